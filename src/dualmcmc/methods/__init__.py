"""Learning rules, one file each, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

Stats = dict[str, Tensor]
Lane = Callable[[], AbstractContextManager[object]]
Lanes = Callable[[], AbstractContextManager[Lane]]


class Losses(NamedTuple):
    """One scalar per network, each a function of that network's parameters alone, and detached statistics."""

    energy: Tensor
    generator: Tensor
    inference: Tensor
    stats: Stats


class Optimizers(NamedTuple):
    """One optimizer per network."""

    energy: torch.optim.Optimizer
    generator: torch.optim.Optimizer
    inference: torch.optim.Optimizer


@contextmanager
def sequential() -> Iterator[Lane]:
    """Blocks of independent work, one after the other. On a GPU the engine passes CUDA streams instead."""
    yield nullcontext


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """One optimizer step; returns the gradient norm."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    optimizer.step()
    return torch.nn.utils.get_total_norm(gradients)
