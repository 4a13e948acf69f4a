"""Dual-MCMC teaching: Algorithm 1 of Cui & Han, NeurIPS 2023.

The paper's alpha, theta and phi are the parameters of `energy` (E = -f), `generator` and `inference`; x_hat, z_hat are
its samples with a hat, x_rev, z_rev those with a tilde. Equation numbers are those of the published PDF. `terms`
contains the options beyond Algorithm 1, each off unless a setting turns it on.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, revise_z, rms_distance, squared_error
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Gaussian, Trio
from dualmcmc.rng import RandomSource


def dual_mcmc(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The three losses for data x (B, ...) and prior draws z (B, d).

    All four samples come from the parameters as they are (alpha_t, theta_t, phi_t) and carry no gradient.
    With `second_x_chain` the energy's loss is left to the function of that name, after the generator's update; with
    `z_start` = "prior" the inference model, if there is one, is left alone.
    """
    energy, generator, inference = trio.energy, trio.generator, None if cfg.z_start == "prior" else trio.inference
    w_data, w_sample = terms.generator_weights(cfg)  # the paper's: 1 / (2 sigma^2) each
    v_data, v_sample = cfg.inference_data_weight, cfg.inference_sample_weight  # the paper's: 1 each
    x_trace, z_trace = Trace(gradients_only=True), Trace(gradients_only=True) if cfg.z_chain.metropolis else None

    with lanes() as lane:
        with lane():  # MCMC sampling
            x_hat = generator(z)
            x_start = terms.add_start_noise(x_hat.detach(), cfg, rng)
            x_rev = revise_x(terms.augmented(energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, x_trace)  # Eq. 3
        with lane():  # MCMC inference
            q = terms.approximate_posterior(inference, x, z)
            z_hat = q.sample(rng).detach()
            z_rev = revise_z(generator, z_hat, x, cfg.sigma, cfg.z_chain, rng, z_trace)  # Eq. 6

    loss_energy = loss_inference = None
    with lanes() as lane:
        with lane():  # learn the EBM
            if not cfg.second_x_chain:
                e = terms.paired_energies(energy, x, x_rev, cfg, rng)
                loss_energy = terms.regularize(e.data.mean() - e.sample.mean(), e, cfg)  # Eq. 7
        with lane():  # learn the generator
            data_error, sample_error = squared_error(x, generator(z_rev)).mean(), squared_error(x_rev, x_hat).mean()
            loss_generator = w_data * data_error + w_sample * sample_error  # Eq. 10
        with lane():  # learn the inference model
            if inference is not None:
                q_rev = Gaussian(*inference(x_rev))
                data_nll, sample_nll = q.nll(z_rev).mean(), q_rev.nll(z).mean()
                loss_inference = v_data * data_nll + v_sample * sample_nll  # Eq. 15

    stats = {
        "energy_slope": terms.mean_slope(x_trace, x),
        "reconstruction_mse": data_error.detach() / x[0].numel(),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
        "z_displacement_rms": rms_distance(z_rev, z_hat).mean(),
        **terms.acceptance(x_trace, z_trace),
    }
    if loss_energy is not None:
        stats |= terms.energy_stats(e)
    if loss_inference is not None:
        stats |= {"inference_data_nll": data_nll.detach(), "inference_sample_nll": sample_nll.detach()}
    return Losses(loss_energy, loss_generator, loss_inference, stats=stats)


def second_x_chain(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching) -> Losses | None:
    """With `second_x_chain`, E's loss on samples from a second x-chain, which starts at the updated generator's."""
    if not cfg.second_x_chain:
        return None
    x_start = terms.add_start_noise(terms.generate(trio.generator, z), cfg, rng)
    x_rev = revise_x(terms.augmented(trio.energy, x_start, cfg, rng), x_start, cfg.x_chain, rng)
    loss_energy, stats = terms.contrast(trio.energy, x, x_rev, cfg, rng)
    return Losses(energy=loss_energy, stats=stats)


METHOD = Method(dual_mcmc, after=second_x_chain)
