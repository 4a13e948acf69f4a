"""An energy alone, with persistent chains.

Du and Mordatch, *Implicit generation and modeling with energy-based models*, NeurIPS 2019; after Tieleman's persistent
contrastive divergence (ICML 2008).

With respect to Algorithm 1 there is no generator and no inference model: the x-chain continues from a sample in a
buffer of earlier ones, or sometimes starts again from uniform noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, rms_distance
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource, rand, randint, uniform_like


def persistent(
    trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, memory: Memory, lanes: Lanes = sequential
) -> Losses:
    """The energy's loss for data x (B, ...)."""
    trace = Trace(gradients_only=True)
    rows, x_start = chain_starts(x, rng, cfg, memory)
    x_rev = revise_x(terms.augmented(trio.energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, trace)
    memory.write("samples", rows, x_rev)
    loss_energy, energy_stats = terms.contrast(trio.energy, x, x_rev, cfg, rng)
    stats = energy_stats | {
        "energy_slope": terms.mean_slope(trace, x),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
        **terms.acceptance(trace, None),
    }
    return Losses(energy=loss_energy, stats=stats)


def chain_starts(x: Tensor, rng: RandomSource, cfg: Teaching, memory: Memory) -> tuple[Tensor, Tensor]:
    """Rows of the buffer (B,) and their samples in the shape of x, some replaced by uniform noise."""
    rows = randint((len(x),), cfg.buffer_size, x, rng)
    restarted = rand((len(x),), x, rng) < cfg.restart_probability
    restarted = restarted.reshape(-1, *[1] * (x.ndim - 1))
    return rows, torch.where(restarted, uniform_like(x, rng), memory["samples"][rows])


def initial_memory(
    cfg: Teaching, sample_shape: tuple[int, ...], images: int, rng: torch.Generator | None
) -> dict[str, Tensor]:
    """A buffer of uniform noise."""
    return {"samples": uniform_like(torch.empty(cfg.buffer_size, *sample_shape), rng)}


METHOD = Method(persistent, memory=initial_memory)
