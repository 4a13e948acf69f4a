"""Learning rules, one file each, and what they share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dualmcmc.config import NETWORKS, Teaching
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource, make_generator, randn
from dualmcmc.utils.errors import UserError, nearest, sanitize

Stats = dict[str, Tensor]
Lane = Callable[[], AbstractContextManager[object]]
Lanes = Callable[[], AbstractContextManager[Lane]]


@dataclass(frozen=True)
class Losses:
    """A method's losses, None for those it does not have, and detached statistics.

    `energy`, `generator` and `inference` are functions of that network's parameters alone; `autoencoder` is one of the
    generator's and the inference model's.
    """

    energy: Tensor | None = None
    generator: Tensor | None = None
    inference: Tensor | None = None
    autoencoder: Tensor | None = None
    stats: Stats = field(default_factory=dict)


@contextmanager
def sequential() -> Iterator[Lane]:
    """Blocks of independent work, one after the other. On a GPU the engine passes CUDA streams instead."""
    yield nullcontext


class Optimizers(NamedTuple):
    """One optimizer per network, None for a network that the method does not train."""

    energy: torch.optim.Optimizer | None = None
    generator: torch.optim.Optimizer | None = None
    inference: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Method:
    """A learning rule.

    `losses(trio, x, z, rng, cfg, lanes=lanes)` are its losses for data x (B, ...) and prior draws z (B, d).
    `after(trio, x, z, rng, cfg)`, if it returns losses, are those of a second update that follows the first.
    `memory(cfg, sample_shape, images, rng)` are the initial tensors of a method that remembers; its losses take
    `memory=` too. `prior(tensors)` are the mean and a factor of the covariance of the latents that it samples from, if
    not N(0, I). `second_order`: gradients of gradients, for which networks cannot be compiled.
    """

    losses: Callable[..., Losses]
    after: Callable[..., Losses | None] | None = None
    memory: Callable[[Teaching, tuple[int, ...], int, torch.Generator | None], dict[str, Tensor]] | None = None
    prior: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]] | None = None
    second_order: bool = False

    def evaluate(
        self,
        trio: Trio,
        x: Tensor,
        z: Tensor,
        rng: RandomSource,
        cfg: Teaching,
        lanes: Lanes = sequential,
        memory: Memory | None = None,
    ) -> Losses:
        """The losses, with `memory` if the method has one."""
        if self.memory is None:
            return self.losses(trio, x, z, rng, cfg, lanes=lanes)
        if memory is None:
            raise UserError("this method remembers: pass memory=Memory(...), see dualmcmc.methods.memory.")
        return self.losses(trio, x, z, rng, cfg, lanes=lanes, memory=memory)

    def initial_memory(
        self, cfg: Teaching, sample_shape: tuple[int, ...], images: int, seed: int, device: torch.device
    ) -> dict[str, Tensor]:
        """What it remembers at first, the same on any device; empty for most methods."""
        if self.memory is None:
            return {}
        tensors = self.memory(cfg, sample_shape, images, make_generator(seed))
        return {name: value.to(device) for name, value in tensors.items()}

    def memory_size(self, cfg: Teaching, sample_shape: tuple[int, ...], images: int) -> int:
        """The bytes that this takes."""
        if self.memory is None:
            return 0
        with torch.device("meta"):  # shapes without memory
            return sum(value.nbytes for value in self.memory(cfg, sample_shape, images, None).values())


def load_method(name: str) -> Method:
    """The method of that name: `METHOD` of the module with its name, such as methods/dual_mcmc.py."""
    if name not in NETWORKS:
        raise UserError(f"unknown method '{sanitize(name)}': use {', '.join(NETWORKS)}.{nearest(name, NETWORKS)}")
    method: Method = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").METHOD
    return method


def step(
    trio: Trio,
    optimizers: Optimizers,
    x: Tensor,
    rng: RandomSource,
    cfg: Teaching,
    lanes: Lanes = sequential,
    method: Method | str = "dual-mcmc",
    memory: Memory | None = None,
) -> Stats:
    """One iteration on data x (B, ...): the losses, then one update of each network. Returns the statistics.

    `memory`: of a method that remembers, see `Method`.
    """
    rule = load_method(method) if isinstance(method, str) else method
    z = randn((len(x), cfg.latent_dim), x, rng)
    losses = rule.evaluate(trio, x, z, rng, cfg, lanes, memory)
    stats = losses.stats | update(optimizers, losses, lanes)
    second = rule.after(trio, x, z, rng, cfg) if rule.after is not None else None
    return stats if second is None else stats | second.stats | update(optimizers, second)


def update(optimizers: Optimizers, losses: Losses, lanes: Lanes = sequential) -> Stats:
    """One optimizer step for each network with a loss; returns the gradient norms."""
    norms: Stats = {}
    with lanes() as lane:
        for names, loss in (
            (("energy",), losses.energy),
            (("generator",), losses.generator),
            (("inference",), losses.inference),
            (("generator", "inference"), losses.autoencoder),
        ):
            if loss is not None:
                with lane():
                    values = descend([getattr(optimizers, name) for name in names], loss)
                norms |= {f"grad_norm_{name}": value for name, value in zip(names, values, strict=True)}
    return norms


def descend(optimizers: Sequence[torch.optim.Optimizer], loss: Tensor) -> list[Tensor]:
    """One step of each optimizer on their common loss; returns the gradient norms."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norms = []
    for optimizer in optimizers:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        optimizer.step()
        norms.append(torch.nn.utils.get_total_norm(gradients))
    return norms
