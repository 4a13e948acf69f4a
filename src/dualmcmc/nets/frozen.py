"""Networks that are read and not changed: inside a Markov chain, and when a trained run is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from dualmcmc.nets.batchnorm import BatchNorm2d

Network = Callable[..., Any]


@contextmanager
def frozen(net: Network) -> Iterator[Network]:
    """Hold `net` still: no weight gradients, no running statistics, no power iterations. Gives what to call.

    A chain calls its network dozens of times at fixed parameters. Without this, each backward pass
    could work out weight gradients that nobody reads, each BatchNorm would fold the chain's states
    into its running statistics, and each spectral norm would be worked out again at every step:
    inside, it is worked out once. BatchNorm still uses batch statistics if the net is in train mode.
    """
    own = getattr(net, "frozen", None)  # one that knows how to: nets/evaluator.py
    if own is not None:
        with own() as still:
            yield still
        return
    if not isinstance(net, torch.nn.Module):  # a plain function has nothing to hold
        yield net
        return
    learned = [p for p in net.parameters() if p.requires_grad]
    tracking = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m.training]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        for norm in tracking:
            norm.track_running_stats = False
        with not_iterating(net), parametrize.cached():
            yield net
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
        for norm in tracking:
            norm.track_running_stats = True


@contextmanager
def not_iterating(net: torch.nn.Module) -> Iterator[None]:
    """Spectral norms as they are, without another power iteration."""
    iterating = [m for m in net.modules() if isinstance(m, parametrize.ParametrizationList) and m.training]
    try:
        for reparametrised in iterating:
            reparametrised.eval()
        yield
    finally:
        for reparametrised in iterating:
            reparametrised.train()


@contextmanager
def sampling_mode(net: torch.nn.Module, batchnorm: str) -> Iterator[None]:
    """Evaluation mode for a while; BatchNorm with "running" statistics or each "batch"'s own.

    Batch statistics are what the authors sample with: an image then depends on its batch-mates.
    """
    modes = {module: module.training for module in net.modules()}
    norms = [m for m in modes if isinstance(m, _BatchNorm) and m.track_running_stats and batchnorm == "batch"]
    shared = [m for m in modes if isinstance(m, BatchNorm2d) and m.across]
    try:
        net.eval()
        for one in shared:  # other processes need not sample now
            one.across = False
        for norm in norms:
            norm.train()
            norm.track_running_stats = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for norm in norms:
            norm.track_running_stats = True
        for one in shared:
            one.across = True
