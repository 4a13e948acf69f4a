"""A log as the curves that a doctor looks at: what was lived and not undone, numbers apart from what is none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]
MIN_LINES = 6  # below it the lines are the first, wild iterations of any run, and there is no trend
FEW, MANY = 3, 20  # lines at either end of the log that stand for its beginning and its present


class History:
    """The lines of training of a log, and its events."""

    def __init__(self, log: Sequence[Entry]) -> None:
        self.log = log
        self.lines = lived(log)
        self._end = min(max(FEW, len(self.lines) // 4), MANY)

    @property
    def images(self) -> int:
        """How far the log goes."""
        return int(self.lines[-1]["images"]) if self.lines else 0

    def events(self, kind: str) -> list[Entry]:
        """The entries of one kind, in order."""
        return [entry for entry in self.log if entry.get("kind") == kind]

    def series(self, name: str) -> list[float]:
        """A curve's finite numbers, in order."""
        return [value for _, value in points(self.lines, name)]

    def recent(self, name: str) -> list[float]:
        """Where a curve is now."""
        return self.series(name)[-self._end :]

    def early(self, name: str) -> list[float]:
        """Where a curve began."""
        return self.series(name)[: self._end]

    def lowest(self, name: str) -> float:
        """The lowest that a curve was for longer than a moment: the least median of its eighths."""
        values = self.series(name)
        length = max(FEW, len(values) // 8)
        return min(statistics.median(values[i : i + length]) for i in range(0, len(values), length))


def points(lines: Sequence[Entry], name: str) -> list[tuple[float, float]]:
    """A curve's finite points, (images, number)."""
    pairs = ((number(line.get("images")), number(line.get(name))) for line in lines)
    return [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]


def lived(log: Sequence[Entry]) -> list[Entry]:
    """The lines of training that still count: those undone by a rollback or done again are left out."""
    kept: list[Entry] = []
    for entry in log:
        if entry.get("kind") == "train":
            while kept and kept[-1]["images"] >= entry["images"]:
                kept.pop()
            kept.append(entry)
        elif entry.get("kind") == "rollback":
            kept = [line for line in kept if line["images"] <= entry["images"]]
    return kept


def number(value: Any) -> float | None:
    """A number of the log, where one that is not finite stands as text; None for what is none."""
    if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
