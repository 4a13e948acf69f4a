import os
import signal
import subprocess
import sys
import time

import pytest

from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.signals import Interrupted, StopSignals
from dualmcmc.utils.reporter import LineReporter
from tests.conftest import TINY


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGTERM, 143)])
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


def test_sighup_stays_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_signal_is_announced_at_once(capfd, number, again):
    with StopSignals(announce=True):
        send(number)
        told = capfd.readouterr().err
    assert told.startswith(f"\n{number.name}: stopping after this iteration")
    assert ("Ctrl-C again" in told) == again
    with StopSignals():
        send(number)
        assert capfd.readouterr().err == ""


LOST_TERMINAL = """
import signal, sys
from dualmcmc.engine.signals import StopSignals
with StopSignals(announce=True) as signals:
    print("ready", flush=True)
    while signals.received is None:
        signal.pause()
    print("more", flush=True)  # to a terminal that is gone
    open(sys.argv[1], "w").write(signals.received.name)
"""


def test_lost_terminal_does_not_break_the_run(tmp_path):
    controller, terminal = os.openpty()
    command = [sys.executable, "-c", LOST_TERMINAL, str(tmp_path / "done")]
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    assert b"ready" in os.read(controller, 100)
    os.close(controller)  # the terminal is gone
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 0
    assert (tmp_path / "done").read_text() == "SIGHUP"


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


def test_sigint_after_another_signal_does_not_discard_the_work():
    with StopSignals() as signals:
        send(signal.SIGHUP)
        send(signal.SIGINT)
        assert signals.received is signal.SIGHUP


def test_second_sigint_under_a_launcher_is_ignored():
    with StopSignals(second_sigint_kills=False) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert signals.received is signal.SIGINT
