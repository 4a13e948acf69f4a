"""Options beyond Algorithm 1, each off unless a setting turns it on.

None is in the paper, except `start_noise` = sigma, with which x_hat is a sample of p(x|z) as in Eq. 4.

| setting | term |
| --- | --- |
| `start_noise` | noise on the x-chain's initial state; 0: x_hat = g(z), as in the authors' code |
| `second_x_chain` | negative samples for E from a second x-chain, after the generator's update (the authors' code) |
| `energy_weight` | factor of E's loss (the authors' code: about 2.5e5) |
| `energy_l2` | L2 penalty on energies (Du & Mordatch, 2019) |
| `energy_augment` | E sees randomly transformed images, against memorising (Karras et al., 2020): `augment.py` |
| `energy_consistency` | penalty on E(x) - E(shifted x), against memorising the training set (bCR, Zhao et al., 2021) |
| `generator_data_weight`, `generator_sample_weight` | loss weights of the generator other than 1 / (2 sigma^2) |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Network, Trace, energies, squared_error
from dualmcmc.methods import Stats
from dualmcmc.methods.augment import AugmentedEnergy, draw_augmentation
from dualmcmc.nets import Gaussian
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import RandomSource, randint, randn_like


def generator_weights(cfg: Teaching) -> tuple[float, float]:
    """Weights of |x - g(z_rev)|^2 and |x_rev - g(z)|^2; the paper's unless set."""
    paper = 1 / (2 * cfg.sigma**2)
    data, sample = cfg.generator_data_weight, cfg.generator_sample_weight
    return paper if data is None else data, paper if sample is None else sample


def add_start_noise(x_hat: Tensor, cfg: Teaching, rng: RandomSource) -> Tensor:
    """The x-chain's initial state."""
    return x_hat + cfg.start_noise * randn_like(x_hat, rng) if cfg.start_noise > 0 else x_hat


def augmented(energy: Network, x: Tensor, cfg: Teaching, rng: RandomSource) -> Network:
    """E for the x-chain from x: with `energy_augment`, E at transformed images."""
    if cfg.energy_augment == 0:
        return energy
    return AugmentedEnergy(energy, draw_augmentation(x, cfg.energy_augment, rng))


def approximate_posterior(inference: Network | None, x: Tensor, z: Tensor) -> Gaussian:
    """q(z|x); without an inference model the prior, for `z_start` = "prior"."""
    return Gaussian(torch.zeros_like(z), torch.zeros_like(z)) if inference is None else Gaussian(*inference(x))


def mean_slope(x_trace: Trace, x: Tensor) -> Tensor:
    """The mean of |dE/dx| along the x-chain."""
    return torch.stack(x_trace.grad_norm).mean() if x_trace.grad_norm else x.new_zeros(())


def acceptance(x_trace: Trace, z_trace: Trace | None) -> Stats:
    """Acceptance rates of the chains that have an accept/reject step."""
    traces = {"x_acceptance": x_trace.accepted, "z_acceptance": z_trace.accepted if z_trace is not None else []}
    return {name: torch.stack(accepted).float().mean() for name, accepted in traces.items() if accepted}


class PairedEnergies(NamedTuple):
    """Energies of data and of revised samples, evaluated as one batch."""

    data: Tensor  # (B,)
    sample: Tensor  # (B,)
    pairs: Tensor  # (B, 2): both
    shifted: Tensor | None  # (B, 2): of the same images after a random shift, with `energy_consistency`


def paired_energies(energy: Network, x: Tensor, x_rev: Tensor, cfg: Teaching, rng: RandomSource) -> PairedEnergies:
    """E(x) and E(x_rev), interleaved in one batch.

    In pairs, because the gradient is a small difference of two large sums; in one batch, so that all images share one
    power iteration of the spectral norm.
    """
    images = torch.stack([x, x_rev], 1).flatten(0, 1)
    if cfg.energy_augment > 0:
        images = draw_augmentation(images, cfg.energy_augment, rng)(images)
    if cfg.energy_consistency > 0:
        images = torch.cat([images, random_shift(images, cfg.energy_shift, rng)])
    pairs, *shifted = energies(energy, images).unflatten(0, (-1, len(x), 2)).unbind(0)
    data, sample = pairs.unbind(1)
    return PairedEnergies(data, sample, pairs, shifted[0] if shifted else None)


def regularize(loss: Tensor, e: PairedEnergies, cfg: Teaching) -> Tensor:
    """E's loss with its penalties and its weight."""
    if cfg.energy_l2 > 0:
        loss = loss + cfg.energy_l2 * (e.data.square().mean() + e.sample.square().mean())
    if e.shifted is not None:
        loss = loss + cfg.energy_consistency * (e.pairs - e.shifted).square().mean(0).sum()
    return cfg.energy_weight * loss


def contrast(energy: Network, x: Tensor, x_sample: Tensor, cfg: Teaching, rng: RandomSource) -> tuple[Tensor, Stats]:
    """E's maximum-likelihood loss E(x) - E(x_sample) (Eq. 7) with its penalties and its weight, and its statistics."""
    e = paired_energies(energy, x, x_sample, cfg, rng)
    return regularize(e.data.mean() - e.sample.mean(), e, cfg), energy_stats(e)


def generate(generator: Network, z: Tensor) -> Tensor:
    """g(z) without gradients."""
    with torch.no_grad(), frozen(generator) as function:
        x: Tensor = function(z)
        return x


def sample_energy(energy: Network, x: Tensor, cfg: Teaching, rng: RandomSource) -> Tensor:
    """E(x) of each sample, (B,), as a function of x alone, for a generator that descends it.

    The gradient is taken here and not when the generator's loss is differentiated, by when E may have been updated.
    """
    point = x.detach().requires_grad_()
    with frozen(augmented(energy, point, cfg, rng)) as net, torch.enable_grad():
        values = energies(net, point)
        (gradient,) = torch.autograd.grad(values.sum(), point)
    return values.detach() + (gradient * (x - x.detach())).flatten(1).sum(1)


def encode(inference: Network, x: Tensor) -> Tensor:
    """The mean of q(z|x), for a deterministic encoder."""
    q = Gaussian(*inference(x))
    return q.mean + 0 * q.log_var  # several processes need a gradient of every parameter


def negative_elbo(
    generator: Network, inference: Network, x: Tensor, weight: float, cfg: Teaching, rng: RandomSource
) -> tuple[Tensor, Stats]:
    """The negative evidence lower bound of x, and its statistics.

    `weight` is that of |x - g(z)|^2, in the bound 1 / (2 sigma^2).
    """
    q = Gaussian(*inference(x))
    error, kl = squared_error(x, generator(q.sample(rng))).mean(), q.kl().mean()
    stats = {"reconstruction_mse": error.detach() / x[0].numel(), "inference_kl": kl.detach()}
    return weight * error + cfg.latent_weight * kl, stats


def energy_stats(e: PairedEnergies) -> Stats:
    """Mean energies of data and of revised samples, and their gap."""
    data, sample = e.data.mean().detach(), e.sample.mean().detach()
    return {"energy_data": data, "energy_sample": sample, "energy_gap": -(data - sample)}


def random_shift(images: Tensor, max_pixels: int, rng: RandomSource) -> Tensor:
    """Images (B, C, H, W), each shifted by up to `max_pixels` along both axes, with reflection at the edges."""
    count, _, height, width = images.shape
    padded = F.pad(images, [max_pixels] * 4, mode="reflect").movedim(1, -1)
    offset = randint((count, 2), 2 * max_pixels + 1, images, rng)
    rows, columns = (
        offset[:, axis, None] + torch.arange(n, device=images.device) for axis, n in enumerate((height, width))
    )
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
