"""The log of a run as curves: its statistics and events, without what was undone or is not a number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]
MIN_LINES = 6  # fewer are the erratic first iterations of any run, without a trend
MIN_WINDOW, MAX_WINDOW = 3, 20  # lines that represent the beginning, or the present, of a run


class History:
    """The training lines of a log, and its events."""

    def __init__(self, log: Sequence[Entry]) -> None:
        self.log = log
        self.lines = effective_lines(log)
        self._window = min(max(MIN_WINDOW, len(self.lines) // 4), MAX_WINDOW)

    @property
    def images(self) -> int:
        """Images trained on, according to the last line."""
        return int(self.lines[-1]["images"]) if self.lines else 0

    def events(self, kind: str) -> list[Entry]:
        """The entries of one kind, in order."""
        return [entry for entry in self.log if entry.get("kind") == kind]

    def series(self, name: str) -> list[float]:
        """The finite values of a statistic, in order."""
        return [value for _, value in curve(self.lines, name)]

    def recent(self, name: str) -> list[float]:
        """The last values of a statistic."""
        return self.series(name)[-self._window :]

    def early(self, name: str) -> list[float]:
        """The first values of a statistic."""
        return self.series(name)[: self._window]

    def lowest(self, name: str) -> float:
        """The lowest level of a statistic, robust to single low values: the smallest median of its eighths."""
        values = self.series(name)
        length = max(MIN_WINDOW, len(values) // 8)
        return min(statistics.median(values[i : i + length]) for i in range(0, len(values), length))


def curve(lines: Sequence[Entry], name: str) -> list[tuple[float, float]]:
    """The finite points of a statistic: (images, value)."""
    pairs = ((parse_number(line.get("images")), parse_number(line.get(name))) for line in lines)
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]


def effective_lines(log: Sequence[Entry]) -> list[Entry]:
    """The training lines that count: not those undone by a rollback or repeated after a resume."""
    kept: list[Entry] = []
    for entry in log:
        if entry.get("kind") == "train":
            while kept and kept[-1]["images"] >= entry["images"]:
                kept.pop()
            kept.append(entry)
        elif entry.get("kind") == "rollback":
            kept = [line for line in kept if line["images"] <= entry["images"]]
    return kept


def parse_number(value: Any) -> float | None:
    """A logged value as a float, None if it is not a number; JSON has NaN and infinity as text."""
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
