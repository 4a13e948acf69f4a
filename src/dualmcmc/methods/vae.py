"""The variational autoencoder.

Kingma and Welling, *Auto-encoding variational Bayes*, ICLR 2014.

With respect to Algorithm 1 there is no energy and there are no chains: the data term of the generator and that of the
inference model become the evidence lower bound.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource


def vae(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The negative evidence lower bound of data x (B, ...)."""
    w_data, _ = terms.generator_weights(cfg)
    loss, stats = terms.negative_elbo(trio.generator, trio.inference, x, w_data, cfg, rng)
    return Losses(autoencoder=loss, stats=stats)


METHOD = Method(vae)
