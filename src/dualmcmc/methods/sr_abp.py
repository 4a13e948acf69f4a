"""A generator alone, learned by short-run inference.

Nijkamp, Pang, Han, Zhou, Zhu and Wu, *Learning multi-layer latent variable model via variational optimization of short
run MCMC for approximate inference*, ECCV 2020.

With respect to Algorithm 1 there is no energy and no inference model: the z-chain starts from the prior. Its step size
is a setting and not optimised, unlike in the paper.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import revise_z, rms_distance, squared_error
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource


def sr_abp(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The generator's loss for data x (B, ...) and prior draws z (B, d), where the chains start."""
    w_data, _ = terms.generator_weights(cfg)
    z_rev = revise_z(trio.generator, z, x, cfg.sigma, cfg.z_chain, rng)
    error = squared_error(x, trio.generator(z_rev)).mean()
    stats = {
        "reconstruction_mse": error.detach() / x[0].numel(),
        "z_displacement_rms": rms_distance(z_rev, z).mean(),
    }
    return Losses(generator=w_data * error, stats=stats)


METHOD = Method(sr_abp)
