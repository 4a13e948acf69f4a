"""What can happen to a run: kills, full and read-only disks, damaged files, deadlines."""

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dualmcmc import config_io
from dualmcmc.engine import checkpoint, loop
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.step import TrainStep
from dualmcmc.engine.trainer import train
from dualmcmc.utils.errors import Damaged
from dualmcmc.utils.reporter import Reporter
from tests.conftest import LONG, TINY, assert_refused, tiny
from tests.processes import Child, command, killed_at_the_end

pytestmark = pytest.mark.xdist_group("processes")  # one worker: they share what is slow to start
KILLS = 100 if LONG else 3
BATCH, SAVE_EVERY = 16, 64  # a state every four iterations: much of the time goes into writing
ENDLESS = ["train", "digits", *TINY, "train.images=100000000", "train.log_every=1", "--device", "cpu", "--out"]
NO_MOUNTS = 77  # exit code


def train_or_resume(out):
    if RunFolder(out).has_states():
        train(resumed_config(out, []), out, "cpu", resume=True)
        return
    config = tiny("train.log_every=1", f"train.save_every={SAVE_EVERY}", "train.sample_every=320", "train.keep=3",
                  f"train.images={160 * KILLS}")  # fmt: skip
    train(config, out, "cpu")


def test_kills(tmp_path, count):
    """Killed at random moments and resumed each time, a run ends as an uninterrupted one does, bit for bit."""
    random_source = random.Random(0)
    whole, killed, kills = tmp_path / "whole", tmp_path / "killed", 0
    assert Child(train_or_resume, whole).wait(600) == 0
    while kills < KILLS:
        child = Child(train_or_resume, killed)
        wait_until = time.monotonic() + random_source.uniform(0, 1)
        if not wait_for_kill(child, killed, wait_until, while_writing=random_source.random() < 0.5):
            check_finished(killed, whole)  # it was faster: once more from the beginning
            shutil.rmtree(killed)
            continue
        child.kill()
        child.wait()
        kills += 1
        count("kills survived")
        count("of these while writing", any(killed.rglob("*.tmp")))
        check_killed(RunFolder(killed))
    assert Child(train_or_resume, killed).wait(600) == 0
    check_finished(killed, whole)


def wait_for_kill(child, out, until, while_writing):
    """Wait until this time, and until a file is being written; False if the process ends before."""
    while child.running:
        if time.monotonic() >= until and (not while_writing or is_writing(out) or is_writing(out / "states")):
            return True
        time.sleep(0.001)
    return False


def is_writing(folder):
    try:
        return any(entry.name.endswith(".tmp") for entry in os.scandir(folder))
    except FileNotFoundError:
        return False


def check_killed(folder):
    """Every file under its final name is valid, and no more than one interval is lost."""
    for path in (*folder.saved_states(), *([folder.snapshot] if folder.snapshot.exists() else [])):
        checkpoint.verify(path)
    for path in folder.samples.glob("[0-9]*.png"):
        Image.open(path).load()
    if folder.config.exists():
        config_io.load_config(str(folder.config))
    if folder.has_states():
        logged = [entry["images"] for entry in read_log(folder.log)]
        assert max([0, *logged]) - int(folder.latest_state().stem) <= SAVE_EVERY + BATCH


def check_finished(out, whole):
    folder = RunFolder(out)
    check_killed(folder)
    assert not list(out.rglob("*.tmp"))
    found, expected = load_file(folder.latest_state()), load_file(RunFolder(whole).latest_state())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    iterations = [line["iteration"] for line in lines if line["kind"] == "train"]
    assert iterations == list(range(1, len(iterations) + 1))  # each once, none missing


def test_damage_is_detected(finished_run, tmp_path, count):
    """Flipped bits, truncation and zeroed blocks at random places of states and snapshots."""
    random_source, folder = random.Random(0), RunFolder(finished_run)
    for path in (folder.latest_state(), folder.snapshot):
        intact, target = path.read_bytes(), tmp_path / path.name
        for _ in range(2000 if LONG else 40):
            content, place = bytearray(intact), random_source.randrange(len(intact))
            kind = random_source.choice(("flip", "truncate", "zeros"))
            if kind == "flip":
                content[place] ^= 1 << random_source.randrange(8)
            elif kind == "truncate":
                del content[place:]
            else:
                content[place : place + 512] = bytes(len(content[place : place + 512]))
                if content == intact:
                    continue
            target.write_bytes(content)
            with pytest.raises(Damaged):
                checkpoint.load(target)
            count("corruptions detected")


def rewrite(path, info=None, **changes):
    """Change the header of a state; its checksum stays valid."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    metadata |= {"info": json.dumps(json.loads(metadata["info"]) | (info or {}))}
    metadata |= {"sha256": checkpoint.PLACEHOLDER.decode(), **changes}
    save_file(load_file(path), path, metadata)
    checkpoint.write_checksum(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "3"}, "has format 3, this version of dualmcmc reads 2"),
        ({"info": {"config": config_io.to_tree(tiny("nets.energy_width=8"))}}, "does not match its networks"),
        ({"info": {"data": "of another dataset"}}, "other data"),
    ],
)
def test_valid_state_of_another_run_is_refused(call, run_folder, changes, message):
    """It is not damaged, so there is no fallback to an earlier state."""
    newest = RunFolder(run_folder).latest_state()
    rewrite(newest, **changes)
    assert_refused(call("train", "--resume", "--out", run_folder), newest.name, message)


def with_own_mounts(commands, *words):
    """Run mount commands in a namespace of this process, then dualmcmc."""
    uid, gid, new_user, new_mounts = os.getuid(), os.getgid(), 0x10000000, 0x20000
    if ctypes.CDLL(None).unshare(new_user | new_mounts):
        os._exit(NO_MOUNTS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    for mount in commands:
        if subprocess.run(["mount", *map(str, mount)]).returncode:
            os._exit(NO_MOUNTS)
    command(*words)


def copied_at_the_end(source, target, *arguments):
    """A temporary file system ends with its process, so copy what is on it."""
    try:
        with_own_mounts(*arguments)
    finally:
        shutil.copytree(source, target)


def assert_error(child, *words):
    code = child.wait()
    if code == NO_MOUNTS:
        pytest.skip("needs user namespaces")
    assert code == 2, child.err
    assert "Traceback" not in child.err
    (line,) = [line for line in child.err.splitlines() if line.startswith("error: ")]
    for word in words:
        assert word in line


@pytest.mark.parametrize("kilobytes", [100, 400])  # full at the first state, or later
def test_full_disk(tmp_path, count, kilobytes):
    """One line; states saved before are valid, and the run can be continued elsewhere."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    mounts = [["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk]]
    words = [*ENDLESS, disk / "run", "train.keep=1000", "train.sample_every=100000"]
    child = Child(copied_at_the_end, disk / "run", copy, mounts, *words)
    assert_error(child, "No space left on device", *(["--resume"] if kilobytes > 100 else []))
    assert not list(copy.rglob("*.tmp"))
    for path in RunFolder(copy).saved_states():
        checkpoint.verify(path)
    if kilobytes > 100:
        assert_resumable(copy)
    count("disk faults survived")


def assert_resumable(out):
    """The run has made progress and can continue."""
    images = int(RunFolder(out).latest_state().stem)
    assert images > 0
    result = train(resumed_config(out, []), out, "cpu", resume=True, max_images=images + BATCH)
    assert result.images == images + BATCH


@pytest.mark.parametrize("words", [["digits", "--out", "new"], ["--resume", "train.images=256", "--out", "run"]])
def test_read_only_folder(tmp_path, finished_run, count, words):
    disk = tmp_path / "disk"
    shutil.copytree(finished_run, disk / "run")
    before = sorted(path.name for path in disk.rglob("*"))
    mounts = [["--bind", disk, disk], ["-o", "remount,ro,bind", disk]]
    assert_error(Child(with_own_mounts, mounts, "train", *words[:-1], disk / words[-1]), str(disk))
    assert sorted(path.name for path in disk.rglob("*")) == before
    count("disk faults survived")


@contextmanager
def endless_training(out):
    """A process that has begun to train."""
    child, folder = Child(command, *ENDLESS, out), RunFolder(out)
    with killed_at_the_end(child):
        deadline = time.monotonic() + 120
        while not (folder.has_states() and int(folder.latest_state().stem) > 0):
            assert child.running, child.err
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield child


def test_folder_that_vanishes(tmp_path, count):
    with endless_training(tmp_path / "run") as child:
        (tmp_path / "run").rename(tmp_path / "moved")
        assert_error(child, "No such file", str(tmp_path / "run"))
    count("disk faults survived")


def test_killed_run_does_not_keep_its_lock(tmp_path):
    with endless_training(tmp_path / "run") as child:
        second = Child(command, "train", "--resume", "--out", tmp_path / "run")
        assert_error(second, f"is being trained by process {child.pid}")
        child.kill()
        child.wait()
        assert_resumable(tmp_path / "run")


@pytest.mark.parametrize("grace", [2, 60])
def test_sigterm_skips_what_takes_too_long(tmp_path, monkeypatch, count, grace):
    """A dry run of 3 seconds does not fit into 2 seconds of grace; a sample grid is not drawn at all."""
    clock_offset, signalled, dry_runs = 0.0, [], []
    monotonic, dry_run = time.monotonic, TrainStep.dry_run

    def slow_dry_run(self):
        nonlocal clock_offset
        clock_offset += 3
        dry_runs.append(bool(signalled))
        return dry_run(self)

    def terminate(images, iteration):
        if iteration == 6:  # after the save at 64 images, which has measured the dry run
            signalled.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + clock_offset)
    monkeypatch.setattr(TrainStep, "dry_run", slow_dry_run)
    monkeypatch.setattr(loop, "write_preview", lambda *_: pytest.fail("a sample grid") if signalled else None)
    monkeypatch.setattr(loop.RunLog, "image", lambda *_: None)
    reporter = Reporter()
    reporter.advance = terminate
    config = tiny("train.images=100000", f"train.grace={grace}", "train.log_every=100")
    result = train(config, tmp_path / "run", "cpu", reporter=reporter)
    assert (result.stop_reason, result.images) == ("SIGTERM", 96)
    assert dry_runs == ([False] if grace == 2 else [False, True])
    folder = RunFolder(tmp_path / "run")
    assert int(folder.latest_state().stem) == 96
    checkpoint.verify(folder.latest_state())
    assert read_log(folder.log)[-1]["reason"] == "SIGTERM"
    count("deadlines met")


def test_sigterm_interrupts_compilation(tmp_path, monkeypatch, count):
    def compile_slowly(self, progress, notify):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        pytest.fail("not interrupted")

    monkeypatch.setattr(TrainStep, "prepare", compile_slowly)
    assert train(tiny(), tmp_path / "run", "cpu").stop_reason == "SIGTERM"
    assert RunFolder(tmp_path / "run").has_states()
    count("deadlines met")
