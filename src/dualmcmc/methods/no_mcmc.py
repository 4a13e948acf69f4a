"""An energy with an entropy-regularised generator as its sampler (VERA).

Grathwohl, Kelly, Hashemi, Norouzi, Swersky and Duvenaud, *No MCMC for me: amortized sampling for fast and stable
training of energy-based models*, ICLR 2021.

With respect to Algorithm 1 there are no chains and no inference model: the generator descends the energy and ascends
the entropy of its samples, whose gradient is estimated by importance sampling from latents around the sample's own.
Unlike in the paper, their spread is a setting and not learned, as is sigma, and the energy's regularisation is that of
the other methods (`energy_l2`, spectral norm) instead of a gradient penalty. The spread should be about that of
p(z|x): if it is much narrower, the estimate loses most of the gradient, since all proposals then explain the sample
as well as its own latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.langevin import Network, squared_norm
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import RandomSource, randn_like


def no_mcmc(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The losses of the energy and of the generator for data x (B, ...) and prior draws z (B, d)."""
    energy, generator = trio.energy, trio.generator
    x_hat = generator(z)
    x_sample = x_hat + cfg.sigma * randn_like(x_hat, rng)  # of p(x|z), as the entropy requires
    sample_energy = terms.sample_energy(energy, x_sample, cfg, rng).mean()

    with lanes() as lane:
        with lane():
            loss_energy, stats = terms.contrast(energy, x, x_sample.detach(), cfg, rng)
        with lane():
            score = log_density_gradient(generator, x_sample.detach(), z, cfg, rng)
            # The entropy's gradient is that of -log p(x_sample) through x_sample alone.
            negative_entropy = (score * x_sample).flatten(1).sum(1).mean()
            loss_generator = sample_energy + cfg.entropy_weight * negative_entropy
    return Losses(energy=loss_energy, generator=loss_generator, stats=stats)


@torch.no_grad()
def log_density_gradient(generator: Network, x: Tensor, z: Tensor, cfg: Teaching, rng: RandomSource) -> Tensor:
    """The gradient of log p(x) for samples x of p(x|z): that of log p(x|z'), averaged over p(z'|x).

    By self-normalised importance sampling with proposals N(z, entropy_spread^2 I).
    """
    log_weights, errors = [], []
    with frozen(generator) as net:
        for _ in range(cfg.entropy_samples):
            noise = randn_like(z, rng)
            proposal = z + cfg.entropy_spread * noise
            error = net(proposal) - x
            log_joint = -squared_norm(error) / (2 * cfg.sigma**2) - squared_norm(proposal) / 2
            log_weights.append(log_joint + squared_norm(noise) / 2)
            errors.append(error)
    weights = torch.stack(log_weights).softmax(0)
    return torch.einsum("kb,kb...->b...", weights, torch.stack(errors)) / cfg.sigma**2


METHOD = Method(no_mcmc)
