"""Stopping on signals: at the end of the iteration, after saving the state."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dualmcmc.utils.progress import discard_output


class Interrupted(BaseException):
    """A signal during interruptible work. Not an Exception, so no library swallows it."""


class StopSignals:
    """While active, SIGINT, SIGTERM and SIGHUP request a stop; a second SIGINT stops immediately.

    `second_sigint_kills` false disables the latter: torchrun forwards the SIGINT that the terminal has already sent to
    every process. `announce`: say on standard error that the signal was received.
    """

    def __init__(self, second_sigint_kills: bool = True, announce: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._second_sigint_kills, self._announce = second_sigint_kills, announce
        self._received_at = 0.0
        self._interruptible = False
        self._previous: dict[signal.Signals, object] = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]  # now: later it may be gone

    @property
    def seconds_since_signal(self) -> float:
        """Seconds since the first stop request; 0 if there was none."""
        return time.monotonic() - self._received_at if self.received is not None else 0.0

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Long work with nothing to save: a signal, even an earlier one, raises `Interrupted` at once."""
        self._interruptible = True
        try:
            if self.received is not None:
                raise Interrupted
            yield
        finally:
            self._interruptible = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: types.FrameType | None) -> None:
        if self.received == number == signal.SIGINT and self._second_sigint_kills:
            raise KeyboardInterrupt
        if self.received is None or number == signal.SIGTERM:  # SIGTERM has a deadline, so it takes precedence
            self._received_at = self._received_at if self.received is signal.SIGTERM else time.monotonic()
            self.received = signal.Signals(number)
        if number == signal.SIGHUP:  # the terminal is gone: writing to it would fail, and with it the run
            for descriptor in self._terminals:
                discard_output(descriptor)
        if self._interruptible:
            raise Interrupted
        if self._announce:
            again = " Ctrl-C again stops at once." if number == signal.SIGINT and self._second_sigint_kills else ""
            text = f"\n{signal.Signals(number).name}: stopping after this iteration; the state is saved.{again}\n"
            with suppress(OSError):  # not print, which a signal may have interrupted
                os.write(sys.stderr.fileno(), text.encode())
