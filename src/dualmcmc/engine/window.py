"""Statistics of a stretch of iterations, kept on the device and read once."""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.crew import ALONE, Crew
from dualmcmc.methods.dual_mcmc import Stats


class Window:
    """What the method reported in the newest `length` iterations. Only `read` waits for the device, and for others."""

    def __init__(self, length: int = 1) -> None:
        self._length = length
        self._names: list[str] = []
        self._rows: Tensor | None = None  # (length, numbers), the newest last

    def add(self, stats: Stats) -> None:
        """Count one iteration in. The rows stay in place, so that a CUDA graph can do this too."""
        values = torch.stack([value.float() for value in stats.values()])[None]
        if self._rows is None:
            self._names = list(stats)
            self._rows = values.new_zeros(self._length, values.shape[1])
        self._rows.copy_(torch.cat([self._rows[1:], values]))

    def read(self, count: int, crew: Crew = ALONE) -> dict[str, float]:
        """Means of the newest `count` iterations over all processes, and the largest energy gap."""
        assert self._rows is not None, "read() needs an iteration first"
        assert count <= self._length
        rows = crew.sum_(self._rows[-count:].clone()).double() / crew.world
        gap = rows[:, self._names.index("energy_gap")].abs().max()  # NaN, where one is among them
        *means, gap_max = torch.cat([rows.mean(0), gap[None]]).tolist()
        return dict(zip(self._names, means, strict=True)) | {"energy_gap_max": gap_max}
