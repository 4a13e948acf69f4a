import os
import signal
import time

import pytest

from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.signals import Interrupted, StopSignals
from dualmcmc.utils.progress import LineReporter
from tests.conftest import TINY


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_stops(tmp_path, monkeypatch, call, number, code):
    """A signal during iteration 5 of the command."""
    monkeypatch.setattr(LineReporter, "advance", lambda self, images, iteration: iteration == 5 and send(number))
    settings = [*TINY, "train.images=100000", "train.save_every=100000"]
    answer = call("train", "digits", *settings, "--device", "cpu", "--out", tmp_path / "run")
    assert answer.code == code, answer
    assert f"--resume --out {tmp_path / 'run'}" in answer.out
    folder = RunFolder(tmp_path / "run")
    last = read_log(folder.log)[-1]
    assert (last["kind"], last["reason"], last["images"]) == ("stop", number.name, 5 * 16)
    assert int(folder.latest_state().stem) == last["images"]


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        send(signal.SIGTERM)
        assert signals.received is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_interruptible_work_stops_at_once():
    with StopSignals() as signals:
        with pytest.raises(Interrupted), signals.interruptible():
            send(signal.SIGTERM)
            time.sleep(60)
            pytest.fail("not interrupted")
        with pytest.raises(Interrupted), signals.interruptible():
            pytest.fail("started although a signal had been received")


def test_sigterm_after_sigint_takes_precedence(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopSignals() as signals:
        send(signal.SIGINT)
        now = 105.0
        assert (signals.received, signals.seconds_since_signal) == (signal.SIGINT, 5)
        send(signal.SIGTERM)
        assert (signals.received, signals.seconds_since_signal) == (signal.SIGTERM, 0)
        now = 106.0
        send(signal.SIGTERM)  # the deadline is that of the first
        assert signals.seconds_since_signal == 1


def test_second_sigint_stops_at_once():
    with StopSignals(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
        send(signal.SIGINT)
        time.sleep(60)


def test_second_sigint_under_a_launcher_is_ignored():
    with StopSignals(second_sigint_kills=False) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert signals.received is signal.SIGINT
