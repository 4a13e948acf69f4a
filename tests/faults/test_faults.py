"""What can happen to a run: kills, disks, damaged files, deadlines."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualmcmc import settings
from dualmcmc.engine import checkpoint
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.journal import read
from dualmcmc.engine.loop import resumed_config, train
from dualmcmc.errors import Damaged
from tests.conftest import TINY, assert_refused, tiny

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
COMMAND = [sys.executable, "-m", "dualmcmc", "train"]
ENDLESS = ["digits", *TINY, "train.images=100000000", "train.log_every=1", "--device", "cpu", "--out"]


def test_kills(tmp_path, often, count):
    kills = 100 if often else 5
    words = ["-m", "tests.faults.kills", tmp_path, kills, 0]
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    count("kills survived", kills)
    count("of these in the middle of a write", found["while_writing"])
    count("most images done again after a kill (saved every 64, batch 16)", found["most_repeated"])


def test_damage(finished_run, tmp_path, often, count):
    """Flipped bits, cuts, zeroed blocks, in states and snapshots at random places: all are noticed."""
    chance = random.Random(0)
    folder = RunFolder(finished_run)
    for path in (folder.latest_state(), folder.snapshot):
        sound, target = path.read_bytes(), tmp_path / path.name
        for _ in range(2000 if often else 40):
            content, place = bytearray(sound), chance.randrange(len(sound))
            kind = chance.choice(("flip", "cut", "zeros"))
            if kind == "flip":
                content[place] ^= 1 << chance.randrange(8)
            elif kind == "cut":
                del content[place:]
            else:
                content[place : place + 512] = bytes(len(content[place : place + 512]))
                if content == sound:
                    continue
            target.write_bytes(content)
            with pytest.raises(Damaged):
                checkpoint.load(target)
            count("corruptions detected")


def rewritten(path, **changes):
    """A sound file with another header."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    info = json.loads(metadata["info"])
    for key, value in changes.pop("info", {}).items():
        info[key] = value
    metadata |= {"info": json.dumps(info), "sha256": checkpoint.BLANK.decode(), **changes}
    save_file(load_file(path), path, metadata)
    checkpoint.seal(path)


def test_states_that_are_sound_but_not_of_this_run(call, run_folder):
    """A newer version, other networks, other data: each said in one line, and none is fallen back from."""
    newest = RunFolder(run_folder).latest_state()
    sound = newest.read_bytes()
    rewritten(newest, version="3")
    assert_refused(call("train", "--resume", "--out", run_folder), newest.name, "of format 3", "reads 2")
    newest.write_bytes(sound)
    tree = settings.to_tree(tiny("nets.energy_width=8"))
    rewritten(newest, info={"config": tree})
    assert_refused(call("train", "--resume", "--out", run_folder), newest.name, "does not fit these networks")
    newest.write_bytes(sound)
    rewritten(newest, info={"data": "of something else"})
    assert_refused(call("train", "--resume", "--out", run_folder), newest.name, "other images")
    newest.write_bytes(sound)
    assert call("train", "--resume", "--out", run_folder).code == 0


def in_a_namespace(script):
    """Run with mounts of its own, where the system lets us."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", script], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def complaint(done, *words):
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0], lines


def shell(*words):
    return " ".join(f"'{word}'" for word in words)


@pytest.mark.parametrize("size", [100, 700])  # kB: full at the first state, or later
def test_a_full_disk(tmp_path, count, size):
    """One line; what was saved before is sound, and the run goes on elsewhere."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    training = shell(*COMMAND, "train.keep=1000", *[word for word in ENDLESS if word != "digits"], disk / "run")
    script = (
        f"mount -t tmpfs -o size={size}k tmpfs '{disk}'; {training}; code=$?; cp -r '{disk}/run' '{copy}'; exit $code"
    )
    complaint(in_a_namespace(script), "No space left on device", *(["--resume"] if size > 100 else []))
    folder = RunFolder(copy)
    assert not list(copy.rglob("*.tmp"))
    for path in folder.saved_states():
        checkpoint.verify(path)
    if size > 100:
        at = int(folder.latest_state().stem)
        assert at > 0
        assert train(resumed_config(copy, []), copy, "cpu", resume=True, max_images=at + 16).images == at + 16
    count("disk faults survived")


def test_a_read_only_folder(tmp_path, finished_run, count):
    disk = tmp_path / "disk"
    shutil.copytree(finished_run, disk / "run")
    before = sorted(path.name for path in disk.rglob("*"))
    mount = f"mount --bind '{disk}' '{disk}' && mount -o remount,ro,bind '{disk}' || exit 77; "
    for words in (["digits", "--out", disk / "new"], ["--resume", "train.images=256", "--out", disk / "run"]):
        done = in_a_namespace(mount + shell(*COMMAND, *words))
        if done.returncode == 77:
            pytest.skip("needs to mount")
        complaint(done, str(disk))
        count("disk faults survived")
    assert sorted(path.name for path in disk.rglob("*")) == before


@pytest.fixture
def training(tmp_path):
    """An endless run that has begun to train."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [*COMMAND, *ENDLESS, str(out)], env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    folder, deadline = RunFolder(out), time.monotonic() + 120
    while not (folder.holds_a_run() and int(folder.latest_state().stem) > 0):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, folder
    process.kill()
    process.wait()


def test_a_folder_that_vanishes(training, count):
    process, folder = training
    folder.root.rename(folder.root.with_name("moved"))
    _, complaints = process.communicate(timeout=60)
    complaint(subprocess.CompletedProcess("", process.returncode, "", complaints), "No such file", str(folder.root))
    count("disk faults survived")


def test_a_second_run_is_refused_and_a_dead_one_does_not_hold_the_lock(training):
    process, folder = training
    second = subprocess.run(
        [*COMMAND, "--resume", "--out", str(folder.root)], env=ENVIRONMENT, capture_output=True, text=True
    )
    complaint(second, f"is being trained by process {process.pid}")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    at = int(folder.latest_state().stem)
    assert train(resumed_config(folder.root, []), folder.root, "cpu", resume=True, max_images=at + 16).images == at + 16


def test_a_stop_with_a_deadline_saves_in_time(tmp_path, monkeypatch, count):
    """SIGTERM, and a kill when the grace is over: pictures and trials that take longer are left out."""
    from dualmcmc.engine import loop
    from dualmcmc.engine.iteration import Iteration

    real, asked = Iteration.try_out, []

    def slow(self):
        time.sleep(3)
        return real(self)

    def ask(done, iteration):
        if iteration == 6:  # a state has been saved at 64 images, so that a trial's time is known
            os.kill(os.getpid(), signal.SIGTERM)
            asked.append(time.monotonic())

    monkeypatch.setattr(Iteration, "try_out", slow)
    monkeypatch.setattr(loop, "write_preview", lambda *given: pytest.fail("a picture") if asked else b"")
    monkeypatch.setattr(loop.Journal, "picture", lambda *given: None)
    reporter = loop.Reporter()
    reporter.advance = ask
    config = tiny("train.images=100000", "train.grace=2", "train.log_every=100")
    outcome = train(config, tmp_path / "run", "cpu", reporter=reporter)
    assert time.monotonic() - asked[0] < 2
    assert (outcome.why, outcome.images) == ("SIGTERM", 96)
    folder = RunFolder(tmp_path / "run")
    assert int(folder.latest_state().stem) == 96
    checkpoint.verify(folder.latest_state())
    assert read(folder.log)[-1]["why"] == "SIGTERM"
    count("deadlines met")


def test_a_signal_while_compiling_does_not_wait_for_the_compiler(tmp_path, monkeypatch, count):
    from dualmcmc.engine.iteration import Iteration

    def compile_for_long(self, watch, note):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    monkeypatch.setattr(Iteration, "prepare", compile_for_long)
    begun = time.monotonic()
    assert train(tiny(), tmp_path / "run", "cpu").why == "SIGTERM"
    assert time.monotonic() - begun < 10
    count("deadlines met")
