"""Stopping in good order: at the end of the iteration, with the state saved."""

from __future__ import annotations

import signal
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager


class Stopped(BaseException):
    """A signal while there was nothing to save. No library's `except Exception` catches it."""


class StopSignals:
    """While active, SIGINT and SIGTERM ask for a stop; a second SIGINT stops at once.

    `insistent` false: it does not, since torchrun passes on the one that everybody has had from the terminal.
    """

    def __init__(self, insistent: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._insistent = insistent
        self._asked_at = 0.0
        self._nothing_to_save = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def seconds_ago(self) -> float:
        """How long ago this process was first asked to stop; 0 where it was not."""
        return time.monotonic() - self._asked_at if self.received is not None else 0.0

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Long work that can be dropped: a signal, also one from before, is `Stopped` at once."""
        self._nothing_to_save = True
        try:
            if self.received is not None:
                raise Stopped
            yield
        finally:
            self._nothing_to_save = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, _: types.FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT and self._insistent:
            raise KeyboardInterrupt
        if self.received is None or number == signal.SIGTERM:  # which is in more of a hurry
            self._asked_at = self._asked_at if self.received is signal.SIGTERM else time.monotonic()
            self.received = signal.Signals(number)
        if self._nothing_to_save:
            raise Stopped
