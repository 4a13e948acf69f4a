"""Several processes on one machine, through gloo: they do what one does, and end together."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dualmcmc.crew import ALONE, Crew
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.journal import read
from dualmcmc.engine.loop import resumed_config, train
from dualmcmc.engine.state import TrainState
from dualmcmc.errors import UserError
from tests.conftest import TINY, tiny
from tests.engine.crew_work import work

ROOT = Path(__file__).parents[2]
ALONE_HERE = {name for name in os.environ if name.startswith(("SLURM_", "LT_", "TORCHELASTIC_"))}
# What a BatchNorm cancels: the gradient is rounding alone, which Adam makes large
CANCELLED = re.compile(r"(conv\d|shortcut)\.bias|running_mean")
NOT_TRAINED = ("seconds", "iterations_per_second")


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name not in ALONE_HERE}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **more}


def free_port():
    """One that no other process is given by the system meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def launched(count, *words, environments=None):
    """`count` processes as torchrun would start them, without its agent."""
    port = free_port()
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}  # fmt: skip

    def own(rank):
        return {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    return [
        subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(**(environments[rank] if environments else own(rank))),
        )
        for rank in range(count)
    ]  # fmt: skip


def ended(processes, timeout=300):
    """Exit codes, and what each said."""
    said = [process.communicate(timeout=timeout) for process in processes]
    return [process.returncode for process in processes], said


@contextmanager
def all_killed(processes):
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The same work by 1, 2 and 4 processes."""
    folders = {}
    for count in (1, 2, 4):
        folders[count] = out = tmp_path_factory.mktemp(f"by{count}")
        if count == 1:
            torch.set_num_threads(1)
            work(out, ALONE)
            continue
        codes, said = ended(launched(count, "-m", "tests.engine.crew_work", out))
        assert codes == [0] * count, said
    return folders


def curve(folder):
    return [
        {name: value for name, value in entry.items() if isinstance(value, float) and name not in NOT_TRAINED}
        for entry in read(RunFolder(folder).log)
        if entry["kind"] == "train"
    ]


@pytest.mark.parametrize("run", ["simple", "second", "synced"])
@pytest.mark.parametrize("count", [2, 4])
def test_their_number_changes_nothing(done, run, count):
    """Loss curves, weights, averages, spectral norms and random states, to float tolerance."""
    one, several = curve(done[1] / run), curve(done[count] / run)
    assert len(one) == len(several) == 10
    for mine, theirs in zip(one, several, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-5)
    mine, theirs = (load_file(RunFolder(done[n] / run).latest_state()) for n in (1, count))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if name.startswith("rng."):
            assert torch.equal(value, theirs[name]), name
        elif name.startswith(("nets.", "ema.")) and not (run == "synced" and CANCELLED.search(name)):
            torch.testing.assert_close(
                value, theirs[name], rtol=1e-3, atol=2e-5, msg=lambda text, name=name: name + text
            )


def test_noise_and_batchnorm_of_their_own_are_others(done):
    """What the settings turn off: then the number of processes does matter, and the runs are still sound."""
    for run in ("own noise", "apart"):
        one, two = (curve(done[count] / run) for count in (1, 2))
        assert one[0]["reconstruction_mse"] != pytest.approx(two[0]["reconstruction_mse"], rel=1e-4)
        assert two[-1]["reconstruction_mse"] == pytest.approx(one[-1]["reconstruction_mse"], rel=0.5)


@pytest.mark.parametrize("count", [2, 4])
def test_samples_and_measurements_are_the_same(done, count):
    with np.load(done[1] / "samples.npz") as one, np.load(done[count] / "samples.npz") as several:
        for name in ("generator", "revised"):
            assert one[name].shape == several[name].shape
            assert (np.abs(one[name].astype(int) - several[name]) <= 1).all()  # weights differ in the last digits
    one, several = (json.loads((done[n] / "numbers.json").read_text()) for n in (1, count))
    for kind in ("generator", "ebm"):
        assert several[kind]["frechet_own_network"] == pytest.approx(one[kind]["frechet_own_network"], rel=1e-3)
        assert several[kind]["precision"] == pytest.approx(one[kind]["precision"], abs=0.02)
    for start, numbers in one["reconstruction"].items():
        assert several["reconstruction"][start] == pytest.approx(numbers, rel=1e-3)


THREADS = """
import os, sys
from dualmcmc.crew import launch
from dualmcmc.engine.loop import train
from tests.conftest import tiny

def of_groups():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith("pt_gloo") for name in names)

crew = launch("cpu")
train(tiny("train.images=32"), sys.argv[1], "cpu", crew=crew)
print(of_groups() > 0)
crew.close()
print(of_groups())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs the threads' names in /proc")
def test_no_thread_of_theirs_outlives_their_parting(tmp_path):
    """Else the process may abort while the interpreter shuts down, its work done."""
    codes, said = ended(launched(2, "-c", THREADS, tmp_path / "run"))
    assert codes == [0, 0], said
    assert [out.split()[-2:] for out, _ in said] == [["True", "0"]] * 2


def test_a_run_of_two_goes_on_alone_and_the_other_way_round(done, tmp_path):
    """The state knows nothing of how many wrote it; two that resume what two began repeat it bit for bit."""
    words = ["-m", "dualmcmc", "train", "digits", *TINY, "train.images=128", "--device", "cpu", "--out"]
    train(tiny(), tmp_path / "alone", "cpu")
    for name in ("whole", "parts"):
        stop = ["--max-images", "64"] if name == "parts" else []
        codes, said = ended(launched(2, *words, tmp_path / name, *stop))
        assert codes == [0, 0], said
    goes_on = tmp_path / "goes on"
    goes_on.symlink_to(tmp_path / "parts copied")
    subprocess.run(["cp", "-r", tmp_path / "parts", tmp_path / "parts copied"], check=True)
    train(resumed_config(goes_on, []), goes_on, "cpu", resume=True)
    codes, said = ended(
        launched(2, "-m", "dualmcmc", "train", "--resume", "--device", "cpu", "--out", tmp_path / "parts")
    )
    assert codes == [0, 0], said
    alone, whole, parts, mixed = (
        load_file(RunFolder(tmp_path / name).latest_state()) for name in ("alone", "whole", "parts", "goes on")
    )
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
        if name.startswith("nets."):
            torch.testing.assert_close(mixed[name], alone[name], rtol=1e-3, atol=2e-5)


HERE = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dualmcmc"],
    "fabric run": [HERE / "fabric", "run", "--devices=2", "--accelerator=cpu", HERE / "dualmcmc"],
}


@pytest.mark.parametrize("launcher", ["torchrun", "fabric run", "srun"])
def test_launchers(launcher, tmp_path):
    words = ["train", "digits", *TINY, "train.images=32", "--device", "cpu", "--out", str(tmp_path / "run")]
    if launcher == "srun":  # what it sets for two tasks on one machine
        given = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "1",
                 "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0",
                 "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}  # fmt: skip
        each = [{**given, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
        codes, said = ended(launched(2, "-m", "dualmcmc", *words, environments=each))
        assert codes == [0, 0], said
        printed, complaints = said[0]
        assert said[1][0] == ""
    else:
        call = [*LAUNCHERS[launcher], *words]
        finished = subprocess.run(call, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert finished.returncode == 0, finished.stderr
        printed, complaints = finished.stdout, finished.stderr
    assert printed.count("trained: 32 images") == 1  # the first process alone speaks
    assert "2 processes on 1 machine" in complaints
    assert "Warning" not in complaints
    (start,) = [entry for entry in read(RunFolder(tmp_path / "run").log) if entry["kind"] == "start"]
    assert start["processes"] == 2


def one_line(said):
    """What all of them complained of: one line."""
    lines = [line for _, complaints in said for line in complaints.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, said
    assert not any("Traceback" in complaints for _, complaints in said)
    return lines[0]


def test_bad_input_is_said_once(tmp_path):
    words = ["-m", "dualmcmc", "train", "digits", "train.batch=15", "--device", "cpu", "--out", tmp_path / "run"]
    codes, said = ended(launched(2, *words))
    assert codes == [2, 2]
    assert "train.batch=15 cannot be shared evenly by 2 processes" in one_line(said)
    assert not (tmp_path / "run").exists()


def test_what_is_for_one_process_says_so(finished_run):
    codes, said = ended(launched(2, "-m", "dualmcmc", "report", finished_run))
    assert codes == [2, 2]
    assert "'report' is for one process" in one_line(said)


def long_training(out):
    words = ["-m", "dualmcmc", "train", "digits", *TINY, "train.images=100000000", "train.save_every=160", "--device",
             "cpu", "--out", out]  # fmt: skip
    processes = launched(2, *words)
    folder = RunFolder(out)
    deadline = time.monotonic() + 120
    while not (folder.holds_a_run() and int(folder.latest_state().stem) > 0):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    return processes


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_is_killed_the_others_end(tmp_path, victim):
    with all_killed(long_training(tmp_path / "run")) as processes:
        os.kill(processes[victim].pid, signal.SIGKILL)
        codes, said = ended(processes, timeout=60)
    assert codes[1 - victim] == 4
    assert "another of the 2 processes is lost" in one_line(said)
    config = resumed_config(tmp_path / "run", [])
    at = int(RunFolder(tmp_path / "run").latest_state().stem)
    assert train(config, tmp_path / "run", "cpu", resume=True, max_images=at + 16).images == at + 16


@pytest.mark.parametrize("signalled", [(0, 1), (1,)], ids=str)
def test_a_signal_saves_once_and_stops_all(tmp_path, signalled):
    with all_killed(long_training(tmp_path / "run")) as processes:
        for rank in signalled:
            processes[rank].send_signal(signal.SIGTERM)
        codes, said = ended(processes, timeout=60)
    assert codes == [143, 143], said
    stop = read(RunFolder(tmp_path / "run").log)[-1]
    assert (stop["kind"], stop["why"]) == ("stop", "SIGTERM")
    assert int(RunFolder(tmp_path / "run").latest_state().stem) == stop["images"]


def test_processes_that_drift_apart_save_nothing():
    class Other(Crew):
        world = 2

        def gather(self, mine):
            return [mine, [value + (number == 5) * 1e-6 for number, value in enumerate(mine)]]

    state = TrainState(tiny(), torch.device("cpu"), crew=Other())
    name = list(state.trio.state_dict())[5]
    with pytest.raises(UserError, match=f"no longer have the same {re.escape(name)}"):
        state.settle()
