"""`kill -9` at random moments of a training run, resumed each time, until it ends: what is left must be what an
uninterrupted run leaves.

Called as a process of its own, `python -m tests.faults.kills FOLDER KILLS SEED`; prints JSON. Its children are forks,
so that a kill costs a fraction of a second and hundreds can be tried.
"""

import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file

import dualmcmc.data
from dualmcmc import settings
from dualmcmc.engine import checkpoint
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.journal import read
from dualmcmc.engine.loop import resumed_config, train
from dualmcmc.engine.state import TrainState
from tests.conftest import tiny

BATCH, EVERY = 16, 64  # a state every four iterations: much of the time goes into writing
KILLS = int(sys.argv[2]) if len(sys.argv) > 2 else 0
CONFIG = tiny("train.log_every=1", f"train.batch={BATCH}", f"train.save_every={EVERY}", "train.sample_every=320",
              f"train.images={max(1600, 160 * KILLS)}", "train.keep=3")  # fmt: skip
LONGEST = 1.0  # seconds until a kill


def start(out):
    """Train, or go on, in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if RunFolder(out).holds_a_run():
                train(resumed_config(out, []), out, "cpu", resume=True)
            else:
                train(CONFIG, out, "cpu")
            code = 0
        finally:
            os._exit(code)
    return child


def finish(out):
    assert os.waitpid(start(out), 0)[1] == 0, f"{out} did not finish"
    return RunFolder(out)


def look(folder):
    """What a kill has left: every state and the snapshot sound, no more than one interval lost. Gives what it hit."""
    writing = [path.name for path in folder.root.rglob("*.tmp")]
    for path in (*folder.saved_states(), *([folder.snapshot] if folder.snapshot.exists() else [])):
        checkpoint.verify(path)
    for path in folder.samples.glob("[0-9]*.png") if folder.samples.exists() else ():
        Image.open(path).load()
    if folder.config.exists():
        settings.load_config(str(folder.config))
    repeated = 0
    if folder.holds_a_run():
        seen = [entry["images"] for entry in read(folder.log)]
        repeated = max([0, *seen]) - int(folder.latest_state().stem)
    assert repeated <= EVERY + BATCH, repeated
    return writing, repeated


def wait(child, out, moment, writing):
    """Until the moment; and, with `writing`, until a file is being written. False: the child has ended before."""
    folder = RunFolder(out)
    while True:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        if time.monotonic() >= moment and (not writing or any(map(half_written, (folder.states, folder.root)))):
            return True


def half_written(place):
    """Whether a file there is on its way to its name."""
    try:
        return any(entry.name.endswith(".tmp") for entry in os.scandir(place))
    except FileNotFoundError:
        return False


def battery(root, kills, seed):
    """Kill `kills` times, over as many runs as that takes."""
    chance, whole = random.Random(seed), finish(root / "whole")
    expected, counts = load_file(whole.latest_state()), {"kills": 0, "while_writing": 0, "runs": 0, "most_repeated": 0}
    while counts["kills"] < kills:
        out = root / f"killed{counts['runs']}"
        while counts["kills"] < kills:
            child = start(out)
            if not wait(child, out, time.monotonic() + chance.uniform(0, LONGEST), chance.random() < 0.5):
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            writing, repeated = look(RunFolder(out))
            counts["kills"] += 1
            counts["while_writing"] += bool(writing)
            counts["most_repeated"] = max(counts["most_repeated"], repeated)
        folder = finish(out)
        look(folder)
        assert not list(out.rglob("*.tmp"))
        found = load_file(folder.latest_state())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        lines = [entry["iteration"] for entry in read(folder.log) if entry["kind"] == "train"]
        assert lines == list(range(1, len(lines) + 1))  # each once, none missing
        for line in folder.log.read_text().splitlines():
            json.loads(line)
        counts["runs"] += 1
    return counts


if __name__ == "__main__":
    torch.set_num_threads(1)
    dualmcmc.data.load(CONFIG.data)  # here, once: children find all imported
    importlib.import_module("torch.utils.tensorboard")
    TrainState(CONFIG, torch.device("cpu"))
    print(json.dumps(battery(Path(sys.argv[1]), KILLS, int(sys.argv[3]))))
