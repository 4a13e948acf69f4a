"""The order in which a run sees its data: a function of the seed alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualmcmc.rng import Stream, derive, generator


class Order:
    """An endless walk through `count` items, a new seeded permutation each epoch."""

    def __init__(self, count: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.count, self.seed, self.device = count, seed, device
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.long)
        self._flip_epoch = -1
        self._coins = torch.empty(0, dtype=torch.bool)

    def indices(self, start: int, length: int) -> Tensor:
        """Items number start, ..., start + length - 1 of the walk; a batch may span epochs."""
        return self._pieces(self._epoch_order, start, length)

    def flips(self, start: int, length: int) -> Tensor:
        """For the same items, whether each is mirrored: a fair coin thrown anew each epoch."""
        return self._pieces(self._epoch_coins, start, length)

    def _pieces(self, of_epoch: Callable[[int], Tensor], start: int, length: int) -> Tensor:
        parts = []
        while length > 0:
            epoch, offset = divmod(start, self.count)
            part = of_epoch(epoch)[offset : offset + length]
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return torch.cat(parts)

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            rng = generator(derive(self.seed, Stream.ORDER, epoch))
            self._epoch, self._permutation = epoch, self._on_device(torch.randperm(self.count, generator=rng))
        return self._permutation

    def _epoch_coins(self, epoch: int) -> Tensor:
        if epoch != self._flip_epoch:
            rng = generator(derive(self.seed, Stream.FLIPS, epoch))
            self._flip_epoch, self._coins = epoch, self._on_device(torch.rand(self.count, generator=rng) < 0.5)
        return self._coins

    def _on_device(self, drawn: Tensor) -> Tensor:
        """Drawn on the CPU, so that every device sees the same; a GPU gets it without being waited for."""
        if torch.device(self.device).type != "cuda":
            return drawn
        return drawn.pin_memory().to(self.device, non_blocking=True)
