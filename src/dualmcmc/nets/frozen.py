"""Context managers that keep networks unchanged: inside a Markov chain, and while a trained run is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from dualmcmc import rng

Network = Callable[..., Any]


@contextmanager
def frozen(net: Network) -> Iterator[Network]:
    """Freeze `net`: no weight gradients, no running statistics, no power iterations. Yields the callable to use.

    A chain evaluates its network dozens of times at fixed parameters. Otherwise every backward pass could compute
    weight gradients nobody reads, every BatchNorm would update its running statistics with the chain's states, and
    every spectral norm would be recomputed at every step; here it is computed once. In train mode BatchNorm still
    normalises with batch statistics.
    """
    own = getattr(net, "frozen", None)  # the engine's executors have their own
    if own is not None:
        with own() as callable_net:
            yield callable_net
        return
    if not isinstance(net, torch.nn.Module):  # a plain function has no state
        yield net
        return
    trainable = [p for p in net.parameters() if p.requires_grad]
    tracking = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        for norm in tracking:
            norm.track_running_stats = False
        with no_power_iteration(net), parametrize.cached():
            yield net
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
        for norm in tracking:
            norm.track_running_stats = True


class Watched(torch.nn.Module):
    """`net`, with `before(x)` called ahead of each evaluation in a chain, that is, while it is frozen."""

    def __init__(self, net: Network, before: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._net, self._before = (net,), before  # in a tuple, so that its parameters are not registered here

    def forward(self, x: Tensor) -> Any:
        """net(x)."""
        return self._net[0](x)

    @contextmanager
    def frozen(self) -> Iterator[Network]:
        """See `frozen`."""
        with frozen(self._net[0]) as net:

            def watched(x: Tensor) -> Any:
                self._before(x)
                return net(x)

            yield watched


@contextmanager
def no_power_iteration(net: torch.nn.Module) -> Iterator[None]:
    """Spectral norms keep their current singular vectors, the older ones too."""
    iterating = [m for m in net.modules() if isinstance(m, parametrize.ParametrizationList) and m.training]
    hooks = spectral_norm_hooks(net)
    counts = [hook.n_power_iterations for hook in hooks]
    try:
        for parametrization in iterating:
            parametrization.eval()
        for hook in hooks:
            hook.n_power_iterations = 0
        yield
    finally:
        for parametrization in iterating:
            parametrization.train()
        for hook, count in zip(hooks, counts, strict=True):
            hook.n_power_iterations = count


def spectral_norm_hooks(net: torch.nn.Module) -> list[SpectralNorm]:
    """Those of the older `torch.nn.utils.spectral_norm`, each with its number of power iterations."""
    return [hook for m in net.modules() for hook in m._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]


@contextmanager
def unchanged(net: torch.nn.Module) -> Iterator[None]:
    """Leave buffers and global random generators as they were: for evaluations that are not part of training."""
    before = {name: value.clone() for name, value in net.named_buffers()}
    with rng.preserved():
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    net.get_buffer(name).copy_(value)


@contextmanager
def modes_kept(net: torch.nn.Module) -> Iterator[None]:
    """Leave each module in train or evaluation mode as it was."""
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def eval_mode(net: torch.nn.Module, batchnorm: str) -> Iterator[None]:
    """Evaluation mode; BatchNorm uses "running" statistics, or those of each "batch".

    The authors sample with batch statistics: an image then depends on the others in its batch.
    """
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and batchnorm == "batch"]
    with modes_kept(net):
        try:
            net.eval()
            for norm in norms:
                norm.train()
                norm.track_running_stats = False
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True
