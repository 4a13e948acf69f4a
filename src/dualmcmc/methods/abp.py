"""Alternating back-propagation: a generator alone, with a persistent z-chain per training image.

Han, Lu, Zhu and Wu, *Alternating back-propagation for generator network*, AAAI 2017.

With respect to Algorithm 1 there is no energy and no inference model: each z-chain continues where that of the same
image ended an epoch ago. (So images must not be mirrored at random.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import revise_z, rms_distance, squared_error
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource


def abp(
    trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, memory: Memory, lanes: Lanes = sequential
) -> Losses:
    """The generator's loss for data x (B, ...)."""
    w_data, _ = terms.generator_weights(cfg)
    z_start = memory["latents"][memory.indices]
    z_rev = revise_z(trio.generator, z_start, x, cfg.sigma, cfg.z_chain, rng)
    memory.write("latents", memory.indices, z_rev)
    error = squared_error(x, trio.generator(z_rev)).mean()
    stats = {
        "reconstruction_mse": error.detach() / x[0].numel(),
        "z_displacement_rms": rms_distance(z_rev, z_start).mean(),
    }
    return Losses(generator=w_data * error, stats=stats)


def initial_memory(
    cfg: Teaching, sample_shape: tuple[int, ...], images: int, rng: torch.Generator | None
) -> dict[str, Tensor]:
    """Prior draws, one per image."""
    return {"latents": torch.randn(images, cfg.latent_dim, generator=rng)}


METHOD = Method(abp, memory=initial_memory)
