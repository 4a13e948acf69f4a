"""Cooperative learning of an energy and a generator.

Xie, Lu, Gao, Zhu and Wu, *Cooperative training of descriptor and generator networks*, IEEE TPAMI 42(1), 2020.

With respect to Algorithm 1 there is no inference model, and the generator learns only from revised samples: the z-chain
starts at the latents that they were generated from (with teaching.z_chain.steps=0 it keeps them).
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, revise_z, rms_distance, squared_error
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource


def cooperative(
    trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential
) -> Losses:
    """The losses of the energy and of the generator for data x (B, ...) and prior draws z (B, d)."""
    energy, generator = trio.energy, trio.generator
    _, w_sample = terms.generator_weights(cfg)
    trace = Trace(gradients_only=True)

    x_start = terms.add_start_noise(terms.generate(generator, z), cfg, rng)
    x_rev = revise_x(terms.augmented(energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, trace)
    z_rev = revise_z(generator, z, x_rev, cfg.sigma, cfg.z_chain, rng)

    with lanes() as lane:
        with lane():
            loss_energy, energy_stats = terms.contrast(energy, x, x_rev, cfg, rng)
        with lane():
            loss_generator = w_sample * squared_error(x_rev, generator(z_rev)).mean()
    stats = energy_stats | {
        "energy_slope": terms.mean_slope(trace, x),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
        **terms.acceptance(trace, None),
        "z_displacement_rms": rms_distance(z_rev, z).mean(),
    }
    return Losses(energy=loss_energy, generator=loss_generator, stats=stats)


METHOD = Method(cooperative)
