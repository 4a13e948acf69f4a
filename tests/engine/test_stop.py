"""Signals, sent to a real process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.stop import Stopped, StopSignals
from tests.conftest import TINY


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_stops(tmp_path, number, code):
    out = tmp_path / "run"
    words = ["train", "digits", *TINY, "train.images=100000000", "train.save_every=100000000", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dualmcmc", *words, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log, deadline = RunFolder(out).log, time.monotonic() + 120
    while not (log.exists() and '"kind": "train"' in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    printed, complaints = process.communicate(timeout=60)
    assert process.returncode == code, complaints
    assert f"--resume --out {out}" in printed
    assert "Traceback" not in complaints
    stopped = json.loads(log.read_text().splitlines()[-1])
    assert stopped["kind"] == "stop"
    assert stopped["why"] == number.name
    assert int(RunFolder(out).latest_state().stem) == stopped["images"] > 0


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_from_before_stops_what_can_be_dropped():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped), signals.nothing_to_save():
            pytest.fail("it began")


def test_a_terminate_after_an_interrupt_is_in_a_hurry():
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received is signal.SIGTERM
        assert signals.seconds_ago < 0.2


def test_a_second_interrupt_stops_at_once():
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
