"""Variational MCMC teaching: a variational autoencoder of revised samples as the sampler of the energy.

Xie, Zheng and Li, *Learning energy-based models with variational auto-encoder as amortized sampler*, AAAI 2021.

With respect to Algorithm 1 there is no z-chain and no data term: generator and inference model maximise the evidence
lower bound of revised samples.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, rms_distance
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource


def amortized(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The energy's loss, and that of the autoencoder, for data x (B, ...) and prior draws z (B, d)."""
    energy, generator, inference = trio.energy, trio.generator, trio.inference
    _, w_sample = terms.generator_weights(cfg)
    trace = Trace(gradients_only=True)

    x_start = terms.add_start_noise(terms.generate(generator, z), cfg, rng)
    x_rev = revise_x(terms.augmented(energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, trace)

    with lanes() as lane:
        with lane():
            loss_energy, energy_stats = terms.contrast(energy, x, x_rev, cfg, rng)
        with lane():
            loss_autoencoder, autoencoder_stats = terms.negative_elbo(generator, inference, x_rev, w_sample, cfg, rng)
    stats = (
        energy_stats
        | autoencoder_stats
        | {
            "energy_slope": terms.mean_slope(trace, x),
            "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
            **terms.acceptance(trace, None),
        }
    )
    return Losses(energy=loss_energy, autoencoder=loss_autoencoder, stats=stats)


METHOD = Method(amortized)
