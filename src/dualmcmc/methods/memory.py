"""What a method keeps between iterations, such as the states of persistent chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _own(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Memory:
    """Named tensors that are updated in place and saved with the state of a run; the same in every process.

    `indices` (B,) of the batch's images in the training set. `all_gather` concatenates the parts of all processes.
    Write after the chains: an iteration may be abandoned before.
    """

    tensors: dict[str, Tensor]
    indices: Tensor
    read_only: bool = False  # while statistics are measured
    all_gather: Callable[[Tensor], Tensor] = _own

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def average(self, name: str, values: Tensor, weight: float) -> None:
        """Move a tensor towards the mean over the batch of `values` (B, ...), as an exponential moving average."""
        if not self.read_only:
            self.tensors[name].lerp_(self.all_gather(values.detach()).mean(0), weight)

    def write(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Replace rows of a tensor; of several values for a row the last one counts."""
        if self.read_only:
            return
        rows, values = self.all_gather(rows), self.all_gather(values.detach())
        same = rows[:, None] == rows[None, :]
        order = torch.arange(len(rows), device=rows.device)
        last = torch.where(same, order, -1).amax(1)
        self.tensors[name][rows] = values[last]
