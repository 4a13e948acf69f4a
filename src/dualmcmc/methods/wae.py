"""The Wasserstein autoencoder with a maximum mean discrepancy.

Tolstikhin, Bousquet, Gelly and Schoelkopf, *Wasserstein auto-encoders*, ICLR 2018.

With respect to Algorithm 1 there is no energy and there are no chains. The encoder is deterministic, the mean of
q(z|x), and the latents of a batch as a whole should look like the prior. The paper's weight for images is 10, of the
squared error itself: teaching.generator_data_weight=1 teaching.latent_weight=10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import squared_error
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource

SCALES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the kernels, in units of the prior's 2 d


def wae(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The reconstruction error of data x (B, ...) and the discrepancy of their latents from prior draws z (B, d)."""
    w_data, _ = terms.generator_weights(cfg)
    latents = terms.encode(trio.inference, x)
    error = squared_error(x, trio.generator(latents)).mean()
    discrepancy = maximum_mean_discrepancy(latents, z)
    stats = {"reconstruction_mse": error.detach() / x[0].numel(), "latent_mmd": discrepancy.detach()}
    return Losses(autoencoder=w_data * error + cfg.latent_weight * discrepancy, stats=stats)


def maximum_mean_discrepancy(a: Tensor, b: Tensor) -> Tensor:
    """The unbiased estimate of MMD^2 between latents a and b, (B, d) each, with inverse multiquadratic kernels."""
    count, dimension = a.shape
    both = torch.cat([a, b])
    norms = both.square().sum(1)
    squares = (norms[:, None] + norms[None, :] - 2 * both @ both.T).clamp(min=0)  # of (2B, 2B) distances
    widths = [2 * dimension * scale for scale in SCALES]
    kernel = torch.stack([width / (width + squares) for width in widths]).sum(0)
    within_a, within_b, between = kernel[:count, :count], kernel[count:, count:], kernel[:count, count:]
    pairs = count * (count - 1)
    within = (within_a.sum() - within_a.trace() + within_b.sum() - within_b.trace()) / pairs
    return within - 2 * between.mean()


METHOD = Method(wae)
