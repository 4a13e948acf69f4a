"""An energy alone, with samples of short chains from noise.

Nijkamp, Hill, Zhu and Wu, *Learning non-convergent non-persistent short-run MCMC toward energy-based model*, NeurIPS
2019.

With respect to Algorithm 1 there is no generator and no inference model: the x-chain starts from uniform noise.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Trace, revise_x, rms_distance
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource, uniform_like


def short_run(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The energy's loss for data x (B, ...)."""
    trace = Trace(gradients_only=True)
    x_start = uniform_like(x, rng)
    x_rev = revise_x(terms.augmented(trio.energy, x_start, cfg, rng), x_start, cfg.x_chain, rng, trace)
    loss_energy, energy_stats = terms.contrast(trio.energy, x, x_rev, cfg, rng)
    stats = energy_stats | {
        "energy_slope": terms.mean_slope(trace, x),
        "x_displacement_rms": rms_distance(x_rev, x_start).mean(),
        **terms.acceptance(trace, None),
    }
    return Losses(energy=loss_energy, stats=stats)


METHOD = Method(short_run)
