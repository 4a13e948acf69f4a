"""Progress on standard error: a live bar on a terminal, a plain line every ten seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["images", "bytes", "parts"]
Advance = Callable[[int], None]
ProgressFactory = Callable[[str, int | None, Unit], AbstractContextManager[Advance]]  # (task, total, unit)
LINE_INTERVAL = 10.0  # seconds
SHOWN_STATS = {"energy_gap": "gap", "energy_slope": "slope", "reconstruction_mse": "mse"}
LEGEND = "gap: E(samples) - E(data); slope: mean |dE/dx|; mse: reconstruction error per pixel"


def no_progress(task: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """Show nothing."""
    return nullcontext(lambda count: None)


def show_progress(task: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """Show the rate and the remaining time."""
    return _bar(task, total, unit) if sys.stderr.isatty() else _lines(task, total, unit)


@contextmanager
def _bar(task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        """Images per second."""

        def render(self, task: Task) -> Text:
            return Text(f"{format_rate(task.finished_speed or task.speed or 0)}/s", style="cyan")

    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),)
    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    elif unit == "images":
        counts = (MofNCompleteColumn(), Rate())
    label = TextColumn("{task.description}", markup=False)
    with Progress(label, BarColumn(24), *counts, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        handle = progress.add_task(task, total=total)
        yield lambda count: progress.advance(handle, count)


@contextmanager
def _lines(task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
    done, start = 0, time.monotonic()
    last = start

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= LINE_INTERVAL:
            last, rate = now, done / (now - start)
            left = f", {max(0, total - done) / rate / 60:.1f} min left" if total and rate else ""
            amount = _format_amount(min(done, total or done), unit)
            if total:
                amount = f"{amount.removesuffix(f' {unit}')} of {_format_amount(total, unit)}"
            speed = _format_amount(rate, unit) if unit == "bytes" else f"{format_rate(rate)} {unit}"
            speed = "" if unit == "parts" else f", {speed}/s"
            print_line(f"{task}: {amount}{speed}{left}")

    yield advance


def print_line(text: str) -> None:
    """Print on standard error; whoever read it may have exited, which must not stop the work."""
    try:
        print(text, file=sys.stderr, flush=True)
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
    """A bar on a terminal, plain lines elsewhere."""
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
        self._task = self._progress.add_task("train", total=total, completed=images, stats="", count="")
        self._total = total
        self._since = time.monotonic()
        self._first: int | None = None
        self.message(LEGEND)
        self._progress.start()

    def advance(self, images: int, iteration: int) -> None:
        if self._first is None:
            self._since, self._first = time.monotonic(), iteration
        elapsed = time.monotonic() - self._since
        rate = f"{format_rate((iteration - self._first) / elapsed)} it/s" if elapsed > 0 else ""
        images = min(images, self._total)  # the last batch may exceed it
        count = f"{_format_count(images)}/{_format_count(self._total)} {rate}"
        self._progress.update(self._task, completed=images, count=count)

    def stats(self, values: dict[str, float]) -> None:
        self._progress.update(self._task, stats=format_stats(values))

    def stop(self) -> None:
        self._progress.stop()


def _training_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    def text(field: str, style: str, **options: Any) -> TextColumn:
        column = Column(no_wrap=True, **options)
        return TextColumn(f"{{task.fields[{field}]}}", style=style, table_column=column)

    return Progress(
        BarColumn(bar_width=12),
        text("count", "cyan"),
        TimeRemainingColumn(),
        text("stats", "dim", overflow="ellipsis"),
        console=Console(stderr=True),
    )


def _format_count(count: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count:.0f}"


class LineReporter(Reporter):
    """A plain line every ten seconds, for logs and pipes."""

    progress = staticmethod(show_progress)

    def message(self, text: str) -> None:
        print_line(text)

    def start(self, images: int, total: int) -> None:
        self._total, self._start, self._last = total, time.monotonic(), time.monotonic()
        self._first: tuple[int, int] | None = None
        self.message(LEGEND)

    def advance(self, images: int, iteration: int) -> None:
        self._first = self._first or (images, iteration)
        self._current = (min(images, self._total), iteration)

    def stats(self, values: dict[str, float]) -> None:
        now = time.monotonic()
        if now - self._last < LINE_INTERVAL or self._first is None:
            return
        self._last, elapsed = now, now - self._start
        per_image = elapsed / max(1, self._current[0] - self._first[0])
        left = (self._total - self._current[0]) * per_image
        rate = format_rate((self._current[1] - self._first[1]) / elapsed)
        print_line(
            f"{self._current[0]:,}/{self._total:,} images  {rate} it/s  {left / 60:.1f} min left  "
            f"{format_stats(values)}"
        )
