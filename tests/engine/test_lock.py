"""One writer at a time: the lock of another process, and of one that died."""

import os
import signal
import subprocess
import sys

import pytest

from dualmcmc.engine.lock import RunLock
from dualmcmc.errors import UserError

HOLD = "import sys, time; from pathlib import Path; from dualmcmc.engine.lock import RunLock\n"
HOLD += "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_dead_process_holds_nothing(tmp_path):
    path = tmp_path / ".lock"
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with (
        pytest.raises(UserError, match=f"is being trained by process {other.pid} on .*choose another --out"),
        RunLock(path),
    ):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    with RunLock(path):
        pass


def test_a_process_cannot_take_its_own_lock_twice(tmp_path):
    with RunLock(tmp_path / ".lock"), pytest.raises(UserError, match="this process"), RunLock(tmp_path / ".lock"):
        pass
    with RunLock(tmp_path / ".lock"):
        pass


def test_a_child_does_not_keep_the_lock(tmp_path):
    """A compiler's helper, say, that outlives the run for a moment."""
    path = tmp_path / ".lock"
    with RunLock(path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        subprocess.run([sys.executable, "-c", HOLD.replace("sleep(60)", "sleep(0)"), str(path)], check=True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
