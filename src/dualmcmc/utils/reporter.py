"""What training shows while it runs: a live bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from dualmcmc.utils.notebook import NotebookBar, in_notebook
from dualmcmc.utils.progress import (
    FIRST_LINE,
    LINE_INTERVAL,
    REDRAW_INTERVAL,
    Pace,
    ProgressFactory,
    format_count,
    format_duration,
    format_rate,
    no_progress,
    print_line,
    show_progress,
)

if TYPE_CHECKING:
    from rich.progress import Progress

SHOWN_STATS = {"energy_gap": "gap", "energy_slope": "slope", "reconstruction_mse": "mse"}
LEGEND = "gap: E(samples) - E(data); slope: mean |dE/dx|; mse: mean squared reconstruction error"


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
    return " ".join(f"{label} {values[name]:.3g}" for name, label in SHOWN_STATS.items() if name in values)


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
