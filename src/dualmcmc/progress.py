"""Long work that is not training, made visible: a bar where people look, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

Unit = Literal["images", "bytes", "parts"]
Advance = Callable[[int], None]
Watch = Callable[[str, int | None, Unit], AbstractContextManager[Advance]]  # what is done, of how many, of what


def quiet(what: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """Nothing is shown."""
    return nullcontext(lambda count: None)


def show(what: str, total: int | None, unit: Unit) -> AbstractContextManager[Advance]:
    """On standard error: a bar with rate and time left, or plain lines where it is not a terminal."""
    return _bar(what, total, unit) if sys.stderr.isatty() else _lines(what, total, unit)


@contextmanager
def _bar(what: str, total: int | None, unit: Unit) -> Iterator[Advance]:
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
        """Images a second."""

        def render(self, task: Task) -> Text:
            return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s", style="cyan")

    counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(),) if unit == "parts" else (MofNCompleteColumn(), Rate())
    if unit == "bytes":
        counts = (DownloadColumn(), TransferSpeedColumn())
    words = TextColumn("{task.description}", markup=False)
    with Progress(words, BarColumn(24), *counts, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _lines(what: str, total: int | None, unit: Unit, every: float = 10.0) -> Iterator[Advance]:
    done, begun = 0, time.monotonic()
    last = begun

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= every:
            last, rate = now, done / (now - begun)
            left = f", {(total - done) / rate / 60:.1f} min left" if total and rate else ""
            of = f" of {_amount(total, unit)}" if total else ""
            speed = "" if unit == "parts" else f", {_amount(rate, unit)}/s"
            print(f"{what}: {_amount(done, unit)}{of}{speed}{left}", file=sys.stderr, flush=True)

    yield advance


def _amount(count: float, unit: Unit) -> str:
    return f"{count / 1e6:,.1f} MB" if unit == "bytes" else f"{count:,.0f} {unit}"
