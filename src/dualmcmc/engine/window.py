"""Statistics of a stretch of iterations, kept on the device and read once."""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.methods.dual_mcmc import Stats


class Window:
    """Means of what the method reports, and the largest energy gap. Only `read` waits for the device."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: Stats = {}
        self._largest_gap: Tensor | None = None

    def add(self, stats: Stats) -> None:
        """Count one iteration in."""
        self.count += 1
        gap = stats["energy_gap"].abs()
        if self._largest_gap is None:
            self._sums, self._largest_gap = {name: value.clone() for name, value in stats.items()}, gap
            return
        for name, value in stats.items():
            self._sums[name] += value
        self._largest_gap = torch.maximum(self._largest_gap, gap)

    def read(self) -> dict[str, float]:
        """The numbers of the stretch; then begin a new one."""
        assert self._largest_gap is not None, "read() needs an iteration first"
        names = list(self._sums)
        values = torch.stack([*(self._sums[name].float() for name in names), self._largest_gap.float()]).tolist()
        record = {name: value / self.count for name, value in zip(names, values[:-1], strict=True)}
        record["energy_gap_max"] = values[-1]
        self.count, self._largest_gap = 0, None
        return record
