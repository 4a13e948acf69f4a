"""Progress: a live bar on a terminal or in a notebook, plain lines on standard error elsewhere.

The first line comes after two seconds, the next ones every ten. The remaining time is shown once it can be estimated.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Literal

from dualmcmc.utils.notebook import NotebookBar, in_notebook

Unit = Literal["images", "samples", "bytes", "parts", "steps"]
Advance = Callable[[float], None]  # by a number of units; a part of an image counts too
ProgressFactory = Callable[[str, int | None, Unit], AbstractContextManager[Advance]]  # (task, total, unit)
FIRST_LINE = 2.0  # seconds until the first plain line
LINE_INTERVAL = 10.0  # seconds between two of them
REDRAW_INTERVAL = 0.5  # seconds between two updates of a bar in a notebook
MIN_ELAPSED = 1.0  # seconds of work on which an estimate is based


def no_progress(task: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """Show nothing."""
    return nullcontext(lambda count: None)


def show_progress(task: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """Show what is done, the rate and the remaining time."""
    if in_notebook():
        return _notebook_bar(task, total, unit)
    return _bar(task, total, unit) if sys.stderr.isatty() else _lines(task, total, unit)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say what the block does if it takes longer than two seconds; for work that cannot report its progress."""
    start = time.monotonic()
    with _repeatedly(lambda: print_line(f"{what} ({format_duration(time.monotonic() - start)})")):
        yield


class Pace:
    """How much of some work is done, how fast it advances, and how long the rest takes."""

    def __init__(self, total: float | None, done: float = 0) -> None:
        self.total = total
        self._done = self._first = done
        self._start = self._last = time.monotonic()

    def advance(self, count: float) -> None:
        """So much more is done."""
        self._done += count
        self._last = time.monotonic()

    @property
    def done(self) -> int:
        """Whole units, at most the total: the last batch may exceed it."""
        done = int(self._done + 1e-6)  # parts of a unit may add up to a little less than one
        return done if self.total is None else min(done, int(self.total))

    @property
    def fraction(self) -> float | None:
        """Of the total that is done; None if there is none."""
        return self.done / self.total if self.total else None

    @property
    def rate(self) -> float | None:
        """Units per second; None if it is unknown."""
        elapsed = self._last - self._start
        return (self._done - self._first) / elapsed if elapsed > 0 and self._done > self._first else None

    @property
    def seconds_left(self) -> float | None:
        """None if it is unknown: at the start, or if the work takes longer than it should at this rate."""
        if self.total is None or self.rate is None or self._last - self._start < MIN_ELAPSED:
            return None
        left = (self.total - self._done) / self.rate - (time.monotonic() - self._last)
        return left if left > 0 else None


@contextmanager
def _bar(task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    pace = Pace(total)

    class State(ProgressColumn):
        """What is done, the rate and the remaining time."""

        def render(self, task: Task) -> Text:
            return Text(_format_state(pace, unit), style="cyan")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(16), State())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        handle = progress.add_task(task, total=total)

        def advance(count: float) -> None:
            pace.advance(count)
            progress.advance(handle, count)

        yield advance


@contextmanager
def _lines(task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
    pace = Pace(total)

    def show() -> None:
        left = pace.seconds_left
        if left is None or left >= 1:  # otherwise what follows says enough
            print_line(f"{task}: {_format_state(pace, unit)}")

    with _repeatedly(show):
        yield pace.advance


@contextmanager
def _notebook_bar(task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
    pace, bar = Pace(total), NotebookBar()

    def show() -> None:
        bar.update(pace.fraction, f"{task}: {_format_state(pace, unit)}")

    with _repeatedly(show, REDRAW_INTERVAL, REDRAW_INTERVAL):
        yield pace.advance
    if bar.shown:
        show()


@contextmanager
def _repeatedly(show: Callable[[], None], first: float | None = None, interval: float | None = None) -> Iterator[None]:
    """Call `show` from a thread, after the `first` seconds of the block (2) and then at every `interval` (10)."""
    ended = threading.Event()

    def loop() -> None:
        wait = FIRST_LINE if first is None else first
        while not ended.wait(wait):
            show()
            wait = LINE_INTERVAL if interval is None else interval

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)  # its output may be blocked by whoever reads it


def _format_state(pace: Pace, unit: Unit) -> str:
    """Such as "12 of 64 images, 1.5/s, 35 s left"."""
    total = "" if not pace.total else f" of {_format_amount(pace.total, unit)}"
    amount = _format_amount(pace.done, unit)
    parts = [amount.removesuffix(f" {unit}") + total if total else amount]
    if pace.rate is not None and unit != "parts":
        parts.append(f"{_format_amount(pace.rate, unit) if unit == 'bytes' else format_rate(pace.rate)}/s")
    if pace.seconds_left is not None:
        parts.append(f"{format_duration(pace.seconds_left)} left")
    return ", ".join(parts)


def format_duration(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if round(seconds / 60) < 100 else f"{seconds / 3600:.1f} h"


def print_line(text: str) -> None:
    """Print on standard error; whoever read it may have exited, which must not stop the work."""
    try:
        sys.stderr.write(f"{text}\n")  # at once, since several threads may print
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr.fileno())


def discard_output(descriptor: int) -> None:
    """Discard what is written to this file descriptor from now on."""
    with suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def _format_amount(count: float, unit: Unit) -> str:
    return f"{count / 1e6:,.1f} MB" if unit == "bytes" else f"{count:,.0f} {unit}"


def format_rate(rate: float) -> str:
    """A number per second: whole if it is large, two digits if it is small."""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.2g}"


def format_count(count: float) -> str:
    """Such as 1.2M, 3.4k or 56."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + letter
    return f"{count:.0f}"
