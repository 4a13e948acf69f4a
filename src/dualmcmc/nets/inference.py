"""The inference model q_phi(z|x) = N(mu(x), diag V(x))."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualmcmc.rng import RandomSource, randn_like
from dualmcmc.utils.geometry import downsampling_stages


class Gaussian(NamedTuple):
    """N(mean, diag exp(log_var)), one per sample; both (B, d)."""

    mean: Tensor
    log_var: Tensor

    def sample(self, rng: RandomSource = None) -> Tensor:
        """One sample each, (B, d)."""
        return self.mean + torch.exp(0.5 * self.log_var) * randn_like(self.mean, rng)

    def nll(self, z: Tensor) -> Tensor:
        """-log q(z|x) without the constant (d/2) log 2 pi, (B,)."""
        return 0.5 * (self.log_var + (z - self.mean).square() * torch.exp(-self.log_var)).sum(1)

    def kl(self) -> Tensor:
        """KL(q || N(0, I)), (B,)."""
        return 0.5 * (self.mean.square() + self.log_var.exp() - 1 - self.log_var).sum(1)


class Prior(NamedTuple):
    """N(mean, scale scale^T), from which a method with a fitted prior samples its latents."""

    mean: Tensor  # (d,)
    scale: Tensor  # (d, d)

    def transform(self, noise: Tensor) -> Tensor:
        """Standard normal noise (B, d) as draws of the prior."""
        return self.mean + noise @ self.scale.T


class ConvInference(nn.Module):
    """conv3, one stride-2 conv4 per halving (channels double up to 1024), heads for mean and log-variance.

    Used by all kinds: 5 M parameters at 32x32 with width 64 (simple, style), 15 M with width 128 (resnet).
    """

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        base, count = downsampling_stages(size)
        widths = [min(width << level, max(1024, width)) for level in range(count + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for in_channels, out_channels in pairwise(widths):
            layers += [nn.Conv2d(in_channels, out_channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.mean = nn.Conv2d(widths[-1], latent_dim, base)
        self.log_var = nn.Conv2d(widths[-1], latent_dim, base)

    def forward(self, x: Tensor) -> Gaussian:
        """(B, C, H, W) images -> mean and log-variance, (B, d) each."""
        h = self.features(x)
        return Gaussian(self.mean(h).flatten(1).to(x.dtype), self.log_var(h).flatten(1).to(x.dtype))
