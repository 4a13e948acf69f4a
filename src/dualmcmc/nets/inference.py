"""The inference model q_phi(z|x) = N(mu(x), diag V(x))."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualmcmc.config import stages
from dualmcmc.nets.blocks import Conv2d
from dualmcmc.rng import Source, gaussian_like


class Gaussian(NamedTuple):
    """N(mean, diag exp(log_var)), one a sample: both (B, d)."""

    mean: Tensor
    log_var: Tensor

    def sample(self, rng: Source = None) -> Tensor:
        """A draw, (B, d)."""
        return self.mean + torch.exp(0.5 * self.log_var) * gaussian_like(self.mean, rng)

    def nll(self, z: Tensor) -> Tensor:
        """-log q(z|x) without the constant (d/2) log 2 pi, (B,)."""
        return 0.5 * (self.log_var + (z - self.mean).square() * torch.exp(-self.log_var)).sum(1)


class ConvInference(nn.Module):
    """conv3, one stride-2 conv4 a halving (channels double up to 1024), heads for mean and log-variance.

    Both kinds use it: 5 M at 32x32 with width 64 (simple), 15 M with width 128 (resnet).
    """

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        base, count = stages(size)
        widths = [min(width << level, max(1024, width)) for level in range(count + 1)]
        layers: list[nn.Module] = [Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for inside, outside in pairwise(widths):
            layers += [Conv2d(inside, outside, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.mean = Conv2d(widths[-1], latent_dim, base)
        self.log_var = Conv2d(widths[-1], latent_dim, base)

    def forward(self, x: Tensor) -> Gaussian:
        """(B, C, H, W) images -> mean and log-variance, (B, d) each."""
        h = self.features(x)
        return Gaussian(self.mean(h).flatten(1).to(x.dtype), self.log_var(h).flatten(1).to(x.dtype))
