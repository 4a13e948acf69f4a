"""BatchNorm over one process's batch, or over the batches of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class BatchNorm2d(nn.BatchNorm2d):
    """Torch's; `across` true normalises over the images of all processes, as one with all of them would.

    Torch's own SyncBatchNorm is for GPUs alone, and for learning: this one also works inside a chain, where the
    gradient of one process's images depends on those of the others.
    """

    across = False

    def forward(self, x: Tensor) -> Tensor:
        if not (self.across and self.training):
            return super().forward(x)
        variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        # Processes have as many images each: moments are means of theirs. In doubles, since two are subtracted.
        moments = torch.stack([mean, variance]).double()
        moments = _mean_of_all(torch.stack([moments[0], moments[1] + moments[0].square()]))
        mean, variance = moments[0].float(), (moments[1] - moments[0].square()).float()
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), x.numel() // x.shape[1])
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        count *= dist.get_world_size()
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        self.num_batches_tracked.add_(1)


def share_statistics(net: nn.Module) -> None:
    """From now on, every BatchNorm of `net` is over all processes."""
    for module in net.modules():
        if isinstance(module, BatchNorm2d):
            module.across = True


class _MeanOfAll(torch.autograd.Function):
    """The mean over all processes. Each one's loss depends on it, and so does the gradient each one needs."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _all_reduce(x) / dist.get_world_size()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduce(gradient.contiguous()) / dist.get_world_size()


def _all_reduce(x: Tensor) -> Tensor:
    """The sum over all processes, in a form that a compiler can follow."""
    from torch.distributed import _functional_collectives

    group = dist.group.WORLD
    assert group is not None
    return _functional_collectives.all_reduce(x, "sum", group)


_mean_of_all: Callable[[Tensor], Tensor] = _MeanOfAll.apply
