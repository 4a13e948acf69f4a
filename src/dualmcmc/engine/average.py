"""Gradients that are the mean over all processes: DDP around the networks as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dualmcmc.crew import Crew
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen


def averaged(nets: Trio, networks: Trio, crew: Crew) -> Trio:
    """`networks`, which evaluate `nets`, learning from all processes; as they are where no launcher started these."""
    if not crew.launched:
        return networks
    evaluated = dict(networks.named_children())
    return Trio(**{name: _Averaged(net, evaluated[name], crew) for name, net in nets.named_children()})


class _Averaged(nn.Module):
    """Evaluates a network. Learning goes through DDP, which sends a bucket of gradients off as soon as it is full,
    while the rest are worked out. A chain asks the network itself: it has no gradients to share."""

    def __init__(self, net: nn.Module, network: nn.Module, crew: Crew) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, as below: the parameters are not this module's
        self._shared = (crew.averaging(_Shown(net, network)),)

    def forward(self, x: Tensor) -> Any:
        """network(x)."""
        return (self._shared if torch.is_grad_enabled() else self._network)[0](x)

    @contextmanager
    def frozen(self) -> Iterator[Callable[..., Any]]:
        """Hold the network still (see `nets.frozen.frozen`)."""
        with frozen(self._network[0]) as still:
            yield still


class _Shown(nn.Module):
    """What DDP sees: the parameters of `net`, and `network` to evaluate it with."""

    def __init__(self, net: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.net, self._network = net, (network,)

    def forward(self, x: Tensor) -> Any:
        """network(x)."""
        return self._network[0](x)
