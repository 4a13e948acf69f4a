"""Statistics of a stretch of iterations, kept on the device and read once."""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.methods.dual_mcmc import Stats


class Window:
    """Means of what the method reports, and the largest energy gap. Only `read` waits for the device."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._largest_gap: Tensor | None = None

    def add(self, stats: Stats) -> None:
        """Count one iteration in. The sums stay in place, so that a CUDA graph can do this too."""
        values, gap = torch.stack([value.float() for value in stats.values()]), stats["energy_gap"].abs().float()
        if self._sums is None or self._largest_gap is None:
            self._names = list(stats)
            self._sums, self._largest_gap = torch.zeros_like(values), torch.zeros_like(gap)
        self._sums += values
        self._largest_gap.copy_(torch.maximum(self._largest_gap, gap))

    def read(self, count: int) -> dict[str, float]:
        """The numbers of the `count` iterations since the last time; then begin a new stretch."""
        assert self._sums is not None, "read() needs an iteration first"
        assert self._largest_gap is not None
        *sums, gap = torch.cat([self._sums, self._largest_gap[None]]).tolist()
        self._sums.zero_()
        self._largest_gap.zero_()
        record = {name: value / count for name, value in zip(self._names, sums, strict=True)}
        return record | {"energy_gap_max": gap}
