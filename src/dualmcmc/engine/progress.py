"""A bar with rate and time left where people look; plain lines where they read a file."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from dualmcmc.progress import Watch, quiet, show

SHOWN = {"energy_gap": "gap", "reconstruction_mse": "mse", "x_moved": "Δx"}


class Reporter:
    """What the loop tells as it goes; this one keeps it to itself."""

    def say(self, text: str) -> None:
        """A line of plain words."""

    def start(self, done: int, total: int) -> None:
        """Training begins at image `done` of `total`."""

    def advance(self, done: int, iteration: int) -> None:
        """An iteration is over."""

    def numbers(self, record: dict[str, float]) -> None:
        """A stretch of iterations is over, with these numbers."""

    def stop(self) -> None:
        """Training is over."""

    watch: Watch = staticmethod(quiet)  # how to show long work before it: reading and packing images


def reporter() -> Reporter:
    """The right kind for where standard error goes."""
    return Bar() if sys.stderr.isatty() else Lines()


def in_words(record: dict[str, float]) -> str:
    """The losses that matter, in one line."""
    return " ".join(f"{word} {record[name]:.3g}" for name, word in SHOWN.items())


class _Count(ProgressColumn):
    """Images done of all, and the rate."""

    def render(self, task: Task) -> Text:
        return Text(f"{_short(task.completed)}/{_short(task.total or 0)} {task.fields['rate']}", style="cyan")


def _short(count: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.0f}"


class Bar(Reporter):
    """A live bar on the terminal; it fits 80 columns."""

    watch = staticmethod(show)

    def __init__(self) -> None:
        self._progress = Progress(
            BarColumn(bar_width=12),
            _Count(Column(no_wrap=True)),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True),
        )

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, done: int, total: int) -> None:
        self._task = self._progress.add_task("train", total=total, completed=done, words="", rate="")
        self._since = time.monotonic()
        self._first: int | None = None
        self._progress.start()

    def advance(self, done: int, iteration: int) -> None:
        if self._first is None:
            self._since, self._first = time.monotonic(), iteration
        passed = time.monotonic() - self._since
        rate = f"{(iteration - self._first) / passed:.1f} it/s" if passed > 0 else ""
        self._progress.update(self._task, completed=done, rate=rate)

    def numbers(self, record: dict[str, float]) -> None:
        self._progress.update(self._task, words=in_words(record))

    def stop(self) -> None:
        self._progress.stop()


class Lines(Reporter):
    """A plain line every ten seconds, for logs and pipes."""

    watch = staticmethod(show)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def start(self, done: int, total: int) -> None:
        self._total, self._begun, self._last = total, time.monotonic(), time.monotonic()
        self._first: tuple[int, int] | None = None

    def advance(self, done: int, iteration: int) -> None:
        self._first = self._first or (done, iteration)
        self._now = (done, iteration)

    def numbers(self, record: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self._last < 10 or self._first is None:
            return
        self._last, passed = now, now - self._begun
        per_image = passed / max(1, self._now[0] - self._first[0])
        left = (self._total - self._now[0]) * per_image
        rate = (self._now[1] - self._first[1]) / passed
        print(
            f"{self._now[0]:,}/{self._total:,} images  {rate:.1f} it/s  {left / 60:.1f} min left  {in_words(record)}",
            file=sys.stderr,
            flush=True,
        )

    def stop(self) -> None:
        pass
