"""Persistent chains, and an energy that also learns through their last step.

Du, Li, Tenenbaum and Mordatch, *Improved contrastive divergence training of energy-based models*, ICML 2021.

With respect to `persistent`, contrastive divergence gets the term that is usually neglected: samples should have a low
energy and a high entropy, and the energy learns both through the gradient in the chain's last step. The entropy is
estimated by the distances to the nearest samples in the buffer. Unlike in the paper, chains are not augmented unless
`energy_augment` does so.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, energies, revise_x, rms_distance
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.methods.memory import Memory
from dualmcmc.methods.persistent import chain_starts, initial_memory
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import RandomSource, randn_like

NEIGHBOURS = 1000  # samples in the buffer among which the nearest is searched
TINY = 1e-6  # squared distance, against the logarithm of 0


def improved_cd(
    trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, memory: Memory, lanes: Lanes = sequential
) -> Losses:
    """The energy's loss for data x (B, ...)."""
    trace = Trace(gradients_only=True)
    chain = replace(cfg.x_chain, steps=max(0, cfg.x_chain.steps - 1))
    rows, x_start = chain_starts(x, rng, cfg, memory)
    x_before = revise_x(terms.augmented(trio.energy, x_start, cfg, rng), x_start, chain, rng, trace)
    x_rev = last_step(trio, x_before, cfg, rng, trace)

    loss_energy, energy_stats = terms.contrast(trio.energy, x, x_rev.detach(), cfg, rng)
    with frozen(trio.energy) as net:  # as a function of x_rev alone
        sample_energy = energies(net, x_rev).mean()
    divergence = sample_energy - nearest_neighbour_entropy(x_rev, memory["samples"][:NEIGHBOURS].clone())
    memory.write("samples", rows, x_rev)
    stats = energy_stats | {
        "energy_slope": terms.mean_slope(trace, x),
        "sampler_divergence": divergence.detach(),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
    }
    return Losses(energy=loss_energy + cfg.energy_weight * cfg.divergence_weight * divergence, stats=stats)


def last_step(trio: Trio, x: Tensor, cfg: Teaching, rng: RandomSource, trace: Trace) -> Tensor:
    """A Langevin step from x as a function of the energy's parameters."""
    leaf, chain = x.detach().requires_grad_(), cfg.x_chain
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(energies(trio.energy, leaf).sum(), leaf, create_graph=True)
    trace.grad_norm.append(gradient.detach().flatten(1).norm(dim=1))
    x_rev = x - chain.step_size * gradient + chain.noise_std * randn_like(x, rng)
    return x_rev if chain.clamp is None else x_rev.clamp(-chain.clamp, chain.clamp)


def nearest_neighbour_entropy(x: Tensor, others: Tensor) -> Tensor:
    """The entropy of samples x up to a constant: the mean logarithm of the distance to the nearest of `others`."""
    squares = torch.cdist(x.flatten(1), others.flatten(1)).square()
    squares = torch.where(squares > TINY, squares, torch.inf)  # a sample is not its own neighbour
    return 0.5 * squares.amin(1).log().mean()


METHOD = Method(improved_cd, memory=initial_memory, second_order=True)
