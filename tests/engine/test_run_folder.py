import os
import signal
import subprocess
import sys

import pytest

from dualmcmc import config_io
from dualmcmc.engine.run_folder import RunFolder, RunLock
from dualmcmc.utils.errors import UserError
from tests.conftest import tiny


def test_states_are_ordered_and_pruned(tmp_path):
    folder = RunFolder(tmp_path)
    folder.states.mkdir()
    assert not folder.has_states()
    with pytest.raises(UserError, match="no saved state"):
        folder.latest_state()
    for images in (100, 5, 1000):
        folder.state_path(images).touch()
    (folder.states / "notes.safetensors").touch()
    assert folder.has_states()
    assert [int(path.stem) for path in folder.saved_states()] == [5, 100, 1000]
    folder.prune_states(2)
    assert [int(path.stem) for path in folder.saved_states()] == [100, 1000]
    assert (folder.states / "notes.safetensors").exists()


def test_temporary_files_of_a_killed_run(tmp_path):
    """Also if it was killed while it wrote its settings; another program's may be in use."""
    folder = RunFolder(tmp_path)
    config, other, plain = (
        tmp_path / name for name in (".config.yaml.7-0123456789abcdef.tmp", ".a.png.7.tmp", ".b.tmp")
    )
    for path in (config, other, plain):
        path.touch()
    folder.remove_temporary_files()
    assert {path.name for path in tmp_path.iterdir()} == {other.name, plain.name}
    folder.config.touch()
    folder.remove_temporary_files()
    assert {path.name for path in tmp_path.iterdir()} == {plain.name, "config.yaml"}


def test_config_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(UserError, match="not a run folder"):
        folder.require_run()
    folder.write_config(tiny())
    folder.require_run()
    assert config_io.load_config(str(folder.config)) == tiny()
    with pytest.raises(UserError, match="does not exist"):
        RunFolder(tmp_path / "absent").require_run()


HOLD_LOCK = """
import sys
from pathlib import Path
from dualmcmc.engine.run_folder import RunLock
with RunLock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def hold_lock(path):
    """A process that takes the lock and keeps it until its standard input is closed."""
    command = [sys.executable, "-c", HOLD_LOCK, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / ".lock"
    with hold_lock(path) as other:
        assert other.stdout.readline() == "locked\n"
        message = f"is being trained by process {other.pid} on .*choose another --out"
        with pytest.raises(UserError, match=message), RunLock(path):
            pass
        other.kill()
    with RunLock(path):
        pass


def test_lock_is_not_reentrant(tmp_path):
    path = tmp_path / ".lock"
    with RunLock(path), pytest.raises(UserError, match="this process"), RunLock(path):
        pass
    with RunLock(path):
        pass


def test_child_does_not_keep_the_lock(tmp_path):
    """A compiler's worker, for example, may outlive the run for a moment."""
    path = tmp_path / ".lock"
    with RunLock(path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with hold_lock(path) as other:
            assert other.stdout.readline() == "locked\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_honours_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        with RunLock(tmp_path / ".lock"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664
