"""The regularised autoencoder: a deterministic one, with a prior that is fitted to the latents.

Ghosh, Sajjadi, Vergari, Black and Schoelkopf, *From variational to deterministic autoencoders*, ICLR 2020.

With respect to Algorithm 1 there is no energy and there are no chains. Latents are the means of q(z|x), kept small by
their squared norm; the paper's L2 penalty on the decoder is optim.generator.weight_decay. Samples come from a Gaussian
with the latents' mean and covariance (the paper's prior N), here running averages during training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import squared_error, squared_norm
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.rng import RandomSource

MOMENTUM = 0.01  # of the running averages, per iteration
MIN_VARIANCE = 1e-6  # along each axis of the fitted prior


def rae(
    trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, memory: Memory, lanes: Lanes = sequential
) -> Losses:
    """The reconstruction error of data x (B, ...) and the size of their latents."""
    w_data, _ = terms.generator_weights(cfg)
    latents = terms.encode(trio.inference, x)
    error, size = squared_error(x, trio.generator(latents)).mean(), squared_norm(latents).mean()
    memory.average("mean", latents, MOMENTUM)
    memory.average("second_moment", latents[:, :, None] * latents[:, None, :], MOMENTUM)
    stats = {"reconstruction_mse": error.detach() / x[0].numel(), "latent_norm": latents.detach().norm(dim=1).mean()}
    return Losses(autoencoder=w_data * error + cfg.latent_weight * size / 2, stats=stats)


def initial_memory(
    cfg: Teaching, sample_shape: tuple[int, ...], images: int, rng: torch.Generator | None
) -> dict[str, Tensor]:
    """Moments of the standard normal distribution."""
    return {"mean": torch.zeros(cfg.latent_dim), "second_moment": torch.eye(cfg.latent_dim)}


def fitted_prior(memory: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of the latents, and a factor of their covariance."""
    mean, second = memory["mean"].double(), memory["second_moment"].double()
    covariance = second - torch.outer(mean, mean)
    values, vectors = torch.linalg.eigh(covariance)
    scale = vectors * values.clamp(min=MIN_VARIANCE).sqrt()
    return mean.float(), scale.float()


METHOD = Method(rae, memory=initial_memory, prior=fitted_prior)
