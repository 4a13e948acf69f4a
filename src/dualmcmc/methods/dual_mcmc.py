"""Dual-MCMC teaching: the paper's Algorithm 1.

The paper's symbols: alpha, theta, phi are the parameters of `energy`, `generator`, `inference`;
x_hat, x_rev and z_hat, z_rev are its samples with a hat and with a tilde.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualmcmc.augment import shifted
from dualmcmc.config import Teaching
from dualmcmc.langevin import energies, revise_x, revise_z, squared_error
from dualmcmc.nets import Gaussian, Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import Source, gaussian, gaussian_like

Stats = dict[str, Tensor]
Together = Callable[..., Sequence[Any]]  # runs pieces of work that do not depend on each other


def in_turn(*works: Callable[[], Any]) -> Sequence[Any]:
    """One after the other. An engine may know better: engine/streams.py."""
    return [work() for work in works]


class Losses(NamedTuple):
    """One scalar a network, each a function of that network's parameters alone; and what was seen."""

    energy: Tensor
    generator: Tensor
    inference: Tensor
    stats: Stats  # detached scalars


class Optimizers(NamedTuple):
    """One optimizer a network."""

    energy: torch.optim.Optimizer
    generator: torch.optim.Optimizer
    inference: torch.optim.Optimizer


def dual_mcmc(
    trio: Trio,
    x: Tensor,
    z: Tensor,
    rng: Source,
    cfg: Teaching,
    teach_energy: bool = True,
    together: Together = in_turn,
) -> Losses:
    """Algorithm 1, one iteration: the three losses for data x (B, ...) and prior draws z (B, d).

    All four samples come from the parameters as they are (the paper's alpha_t, theta_t, phi_t); none
    carries a gradient. Minimising a loss follows the paper's gradient for that network.
    `teach_energy` false leaves the energy's loss at 0, for one that learns from other samples.
    """

    def mcmc_sampling() -> tuple[Tensor, Tensor, Tensor]:
        # x_hat from the generator at z, revised by k_x Langevin steps on the energy.
        x_hat = trio.generator(z)
        x_start = chain_start(x_hat, rng, cfg)
        return x_hat, x_start, revise_x(trio.energy, x_start, cfg.x_chain, rng)

    def mcmc_inference() -> tuple[Gaussian, Tensor, Tensor]:
        # z_hat from the inference model at x, revised by k_z steps on p(z|x).
        q = Gaussian(*trio.inference(x))
        z_hat = q.sample(rng).detach()
        return q, z_hat, revise_z(trio.generator, z_hat, x, cfg.sigma, cfg.z_chain, rng)

    (x_hat, x_start, x_rev), (q, z_hat, z_rev) = together(mcmc_sampling, mcmc_inference)

    (energy, energy_stats), (generator, generator_stats), (inference, inference_stats) = together(
        # Learn pi_alpha (eq:ebm_obj_kl_ours_grad): raise f = -E on data, lower it on revised samples.
        lambda: energy_loss(trio, x, x_rev, rng, cfg) if teach_energy else (x.new_zeros(()), {}),
        # Learn p_theta (eq:gen_obj_kl_ours_grad): raise log p(x, z_rev) + log p(x_rev, z); p(z) has no theta.
        lambda: generator_loss(x, trio.generator(z_rev), x_rev, x_hat, cfg),
        # Learn q_phi (eq:inf_obj_kl_ours_grad): raise log q(z_rev|x) + log q(z|x_rev).
        lambda: inference_loss(q, z_rev, Gaussian(*trio.inference(x_rev)), z, cfg),
    )
    with torch.no_grad():
        moved = {
            "x_moved": (x_rev - x_start).square().flatten(1).mean(1).sqrt().mean(),
            "z_moved": (z_rev - z_hat).square().flatten(1).mean(1).sqrt().mean(),
        }
    return Losses(energy, generator, inference, energy_stats | generator_stats | inference_stats | moved)


def chain_start(x_hat: Tensor, rng: Source, cfg: Teaching) -> Tensor:
    """Where the x-chain starts: g(z), with the noise of p(x|z) where `start_noise` asks for it."""
    start = x_hat.detach()
    return start + cfg.start_noise * gaussian_like(start, rng) if cfg.start_noise > 0 else start


def energy_loss(trio: Trio, x: Tensor, x_rev: Tensor, rng: Source, cfg: Teaching) -> tuple[Tensor, Stats]:
    """mean E(x) - mean E(x_rev), where asked with more (`energy_l2`, `energy_consistency`), and both means."""
    # One batch, in pairs: the gradient is a small difference of two large sums; and one spectral norm for both.
    images = torch.stack([x, x_rev], 1).flatten(0, 1)
    if cfg.energy_consistency > 0:
        images = torch.cat([images, shifted(images, cfg.energy_shift, rng)])
    in_place, *moved = energies(trio.energy, images).unflatten(0, (-1, len(x), 2)).unbind(0)
    on_data, on_samples = in_place.unbind(1)
    loss = on_data.mean() - on_samples.mean()
    stats = {"energy_data": on_data.mean(), "energy_sample": on_samples.mean(), "energy_gap": -loss}
    if cfg.energy_l2 > 0:  # not in the paper: as Du & Mordatch (2019) bound theirs
        loss = loss + cfg.energy_l2 * (on_data.square().mean() + on_samples.square().mean())
    if moved:  # not in the paper: as Zhao et al. (2021, bCR) keep a GAN's critic from learning images by heart
        loss = loss + cfg.energy_consistency * (in_place - moved[0]).square().mean(0).sum()
    return cfg.energy_weight * loss, {name: value.detach() for name, value in stats.items()}


def generator_loss(x: Tensor, g_of_z_rev: Tensor, x_rev: Tensor, x_hat: Tensor, cfg: Teaching) -> tuple[Tensor, Stats]:
    """-log p(x|z_rev) - log p(x_rev|z), weighted, and the first as an error per pixel."""
    paper_weight = 1 / (2 * cfg.sigma**2)
    data_error, sample_error = squared_error(x, g_of_z_rev).mean(), squared_error(x_rev, x_hat).mean()
    loss = (
        weight_or(cfg.generator_data_weight, paper_weight) * data_error
        + weight_or(cfg.generator_sample_weight, paper_weight) * sample_error
    )
    return loss, {"reconstruction_mse": data_error.detach() / x[0].numel()}


def inference_loss(q: Gaussian, z_rev: Tensor, q_rev: Gaussian, z: Tensor, cfg: Teaching) -> tuple[Tensor, Stats]:
    """-log q(z_rev|x) - log q(z|x_rev), weighted, and both; q is q(.|x), q_rev is q(.|x_rev)."""
    on_data, on_samples = q.nll(z_rev).mean(), q_rev.nll(z).mean()
    loss = cfg.inference_data_weight * on_data + cfg.inference_sample_weight * on_samples
    return loss, {"inference_data_nll": on_data.detach(), "inference_sample_nll": on_samples.detach()}


def weight_or(weight: float | None, paper: float) -> float:
    """A loss weight, or the paper's where none is set."""
    return paper if weight is None else weight


def step(
    trio: Trio,
    optimizers: Optimizers,
    x: Tensor,
    rng: Source,
    cfg: Teaching,
    together: Together = in_turn,
) -> Stats:
    """Algorithm 1, one iteration with its three updates, on data x (B, ...). Returns what was seen."""
    z = gaussian((len(x), cfg.latent_dim), x, rng)
    losses = dual_mcmc(trio, x, z, rng, cfg, not cfg.second_x_chain, together)
    stats = losses.stats

    def learn_energy() -> Tensor:
        loss = losses.energy
        if cfg.second_x_chain:  # the authors' code: fresh negatives from the generator just updated
            with torch.no_grad(), frozen(trio.generator) as still:
                x_start = chain_start(still(z), rng, cfg)
            loss, seen = energy_loss(trio, x, revise_x(trio.energy, x_start, cfg.x_chain, rng), rng, cfg)
            stats.update(seen)
        return descend(optimizers.energy, loss)

    def learn_generator() -> Tensor:
        return descend(optimizers.generator, losses.generator)

    def learn_inference() -> Tensor:
        return descend(optimizers.inference, losses.inference)

    if cfg.second_x_chain:
        generator, inference, energy = in_turn(learn_generator, learn_inference, learn_energy)
    else:
        energy, generator, inference = together(learn_energy, learn_generator, learn_inference)
    norms = {"grad_norm_generator": generator, "grad_norm_inference": inference, "grad_norm_energy": energy}
    return stats | norms


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """One update; returns the norm of the gradient."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    optimizer.step()
    return torch.nn.utils.get_total_norm(gradients)
