"""Dual-MCMC teaching: Algorithm 1 of Cui & Han, NeurIPS 2023.

The paper's alpha, theta and phi are the parameters of `energy` (E = -f), `generator` and `inference`; x_hat, z_hat are
its samples with a hat, x_rev, z_rev those with a tilde. Equation numbers are those of the published PDF. `terms`
contains the options beyond Algorithm 1, each off unless a setting turns it on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, revise_z, rms_distance, squared_error
from dualmcmc.methods import Lanes, Losses, Optimizers, Stats, descend, sequential, terms
from dualmcmc.nets import Gaussian, Trio
from dualmcmc.rng import RandomSource, randn


def dual_mcmc(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The three losses for data x (B, ...) and prior draws z (B, d).

    All four samples come from the parameters as they are (alpha_t, theta_t, phi_t) and carry no gradient.
    With `second_x_chain` the energy's loss is left to `step`, after the generator's update.
    """
    energy, generator, inference = trio.energy, trio.generator, trio.inference
    w_data, w_sample = terms.generator_weights(cfg)  # the paper's: 1 / (2 sigma^2) each
    x_trace, z_trace = Trace(gradients_only=True), Trace(gradients_only=True) if cfg.z_chain.metropolis else None

    with lanes() as lane:
        with lane():  # MCMC sampling
            x_hat = generator(z)
            x_start = terms.add_start_noise(x_hat.detach(), cfg, rng)
            x_rev = revise_x(terms.augmented(energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, x_trace)  # Eq. 3
        with lane():  # MCMC inference
            q = Gaussian(*inference(x))
            z_hat = q.sample(rng).detach()
            z_rev = revise_z(generator, z_hat, x, cfg.sigma, cfg.z_chain, rng, z_trace)  # Eq. 6

    with lanes() as lane:
        with lane():  # learn the EBM
            if cfg.second_x_chain:
                loss_energy, energy_stats = x.new_zeros(()), {}  # `step` takes it after the generator's update
            else:
                e = terms.paired_energies(energy, x, x_rev, cfg, rng)
                loss_energy = e.data.mean() - e.sample.mean()  # Eq. 7
                loss_energy, energy_stats = terms.regularize(loss_energy, e, cfg), terms.energy_stats(e)
        with lane():  # learn the generator
            data_error, sample_error = squared_error(x, generator(z_rev)).mean(), squared_error(x_rev, x_hat).mean()
            loss_generator = w_data * data_error + w_sample * sample_error  # Eq. 10
        with lane():  # learn the inference model
            q_rev = Gaussian(*inference(x_rev))
            data_nll, sample_nll = q.nll(z_rev).mean(), q_rev.nll(z).mean()
            loss_inference = cfg.inference_data_weight * data_nll + cfg.inference_sample_weight * sample_nll  # Eq. 15

    stats = energy_stats | {
        "energy_slope": torch.stack(x_trace.grad_norm).mean() if x_trace.grad_norm else x.new_zeros(()),
        "reconstruction_mse": data_error.detach() / x[0].numel(),
        "inference_data_nll": data_nll.detach(),
        "inference_sample_nll": sample_nll.detach(),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
        "z_displacement_rms": rms_distance(z_rev, z_hat).mean(),
        **terms.acceptance(x_trace, z_trace),
    }
    return Losses(loss_energy, loss_generator, loss_inference, stats)


def step(
    trio: Trio, optimizers: Optimizers, x: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential
) -> Stats:
    """One iteration of Algorithm 1 on data x (B, ...): the losses, then one update of each network."""
    z = randn((len(x), cfg.latent_dim), x, rng)
    loss_energy, loss_generator, loss_inference, stats = dual_mcmc(trio, x, z, rng, cfg, lanes)
    with lanes() as lane:
        if not cfg.second_x_chain:
            with lane():
                norm_energy = descend(optimizers.energy, loss_energy)
        with lane():
            norm_generator = descend(optimizers.generator, loss_generator)
        with lane():
            norm_inference = descend(optimizers.inference, loss_inference)
    if cfg.second_x_chain:
        loss_energy, energy_stats = terms.second_x_chain(trio, x, z, cfg, rng)
        norm_energy = descend(optimizers.energy, loss_energy)
        stats = stats | energy_stats
    norms = {"generator": norm_generator, "inference": norm_inference, "energy": norm_energy}
    return stats | {f"grad_norm_{name}": norm for name, norm in norms.items()}
