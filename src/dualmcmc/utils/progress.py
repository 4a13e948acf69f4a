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
from typing import TYPE_CHECKING, Any, Literal

from dualmcmc.utils.notebook import NotebookBar, in_notebook

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["images", "samples", "bytes", "parts", "steps"]
Advance = Callable[[float], None]  # by a number of units; a part of an image counts too
ProgressFactory = Callable[[str, int | None, Unit], AbstractContextManager[Advance]]  # (task, total, unit)
FIRST_LINE = 2.0  # seconds until the first plain line
LINE_INTERVAL = 10.0  # seconds between two of them
REDRAW_INTERVAL = 0.5  # seconds between two updates of a bar in a notebook
MIN_ELAPSED = 1.0  # seconds of work on which an estimate is based
SHOWN_STATS = {"energy_gap": "gap", "energy_slope": "slope", "reconstruction_mse": "mse"}
LEGEND = "gap: E(samples) - E(data); slope: mean |dE/dx|; mse: mean squared reconstruction error"


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


class Reporter:
    """What training reports while it runs; this one shows nothing."""

    progress: ProgressFactory = staticmethod(no_progress)  # for long work before training

    def message(self, text: str) -> None:
        """Show a line of text."""

    def start(self, images: int, total: int) -> None:
        """Training starts at `images` of `total` images."""

    def advance(self, images: int, iteration: int) -> None:
        """An iteration has finished."""

    def stats(self, values: dict[str, float]) -> None:
        """A log interval has finished, with these statistics."""

    def stop(self) -> None:
        """Training has ended."""


def make_reporter() -> Reporter:
    """A bar on a terminal or in a notebook, plain lines elsewhere."""
    if in_notebook():
        return NotebookReporter()
    return BarReporter() if sys.stderr.isatty() else LineReporter()


def format_stats(values: dict[str, float]) -> str:
    """The most important statistics on one line."""
    return " ".join(f"{label} {values[name]:.3g}" for name, label in SHOWN_STATS.items())


class BarReporter(Reporter):
    """A live bar that fits 80 columns."""

    progress = staticmethod(show_progress)

    def __init__(self) -> None:
        self._progress = _training_bar()

    def message(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, images: int, total: int) -> None:
        self._task = self._progress.add_task("train", total=total, completed=images, stats="", count="", left="")
        self._pace = TrainingPace(images, total)
        self.message(LEGEND)
        self._progress.start()

    def advance(self, images: int, iteration: int) -> None:
        self._pace.advance(images, iteration)
        done, total = (format_count(count) for count in (self._pace.images, self._pace.total))
        count, left = f"{done}/{total} {self._pace.rate}", self._pace.left
        self._progress.update(self._task, completed=self._pace.images, count=count, left=left)

    def stats(self, values: dict[str, float]) -> None:
        self._progress.update(self._task, stats=format_stats(values))

    def stop(self) -> None:
        self._progress.stop()


def _training_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    def text(field: str, style: str, **options: Any) -> TextColumn:
        column = Column(no_wrap=True, **options)
        return TextColumn(f"{{task.fields[{field}]}}", style=style, table_column=column)

    return Progress(
        BarColumn(bar_width=12),
        text("count", "cyan"),
        text("left", "cyan"),
        text("stats", "dim", overflow="ellipsis"),
        console=Console(stderr=True),
    )


def format_count(count: float) -> str:
    """Such as 1.2M, 3.4k or 56."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + letter
    return f"{count:.0f}"


class LineReporter(Reporter):
    """Plain lines, for logs and pipes."""

    progress = staticmethod(show_progress)

    def message(self, text: str) -> None:
        print_line(text)

    def start(self, images: int, total: int) -> None:
        self._pace = TrainingPace(images, total)
        self._next = time.monotonic() + FIRST_LINE
        self.message(LEGEND)

    def advance(self, images: int, iteration: int) -> None:
        self._pace.advance(images, iteration)

    def stats(self, values: dict[str, float]) -> None:
        now = time.monotonic()
        if now < self._next or not self._pace.rate:
            return
        self._next = now + LINE_INTERVAL
        count = f"{self._pace.images:,}/{self._pace.total:,} images"
        print_line("  ".join(part for part in (count, self._pace.rate, self._pace.left, format_stats(values)) if part))


class NotebookReporter(Reporter):
    """A bar below the cell, and messages on standard output: notebooks show standard error as if something failed."""

    progress = staticmethod(show_progress)

    def __init__(self) -> None:
        self._bar, self._stats, self._next = NotebookBar(), "", 0.0

    def message(self, text: str) -> None:
        print(text)

    def start(self, images: int, total: int) -> None:
        self._pace = TrainingPace(images, total)
        self.message(LEGEND)

    def advance(self, images: int, iteration: int) -> None:
        self._pace.advance(images, iteration)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REDRAW_INTERVAL
            self._show()

    def stats(self, values: dict[str, float]) -> None:
        self._stats = format_stats(values)

    def stop(self) -> None:
        if self._bar.shown:
            self._show()

    def _show(self) -> None:
        pace = self._pace
        done, total = format_count(pace.images), format_count(pace.total)
        parts = (f"train: {done}/{total}", pace.rate, pace.left, self._stats)
        self._bar.update(pace.images / pace.total, "  ".join(part for part in parts if part))


class TrainingPace:
    """The pace of training: images, and iterations per second since the first, which takes longer."""

    def __init__(self, images: int, total: int) -> None:
        self.images, self.total = images, total
        self._images: Pace | None = None
        self._iterations: Pace | None = None

    def advance(self, images: int, iteration: int) -> None:
        """An iteration has finished."""
        if self._images is None or self._iterations is None:
            self._images, self._iterations = Pace(self.total, images), Pace(None, iteration)
            self._last = images, iteration
        self._images.advance(images - self._last[0])
        self._iterations.advance(iteration - self._last[1])
        self._last = images, iteration
        self.images = min(images, self.total)  # the last batch may exceed it

    @property
    def rate(self) -> str:
        """Iterations per second; empty if it is unknown."""
        rate = None if self._iterations is None else self._iterations.rate
        return "" if rate is None else f"{format_rate(rate)} it/s"

    @property
    def left(self) -> str:
        """The remaining time; empty if it is unknown."""
        left = None if self._images is None else self._images.seconds_left
        return "" if left is None else f"{format_duration(left)} left"
