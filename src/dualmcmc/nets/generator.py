"""The generator's mean g_theta(z) in p(x|z) = N(g(z), sigma^2 I) (eq:gen), images in [-1, 1]."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualmcmc.config import stages
from dualmcmc.nets.batchnorm import BatchNorm2d
from dualmcmc.nets.blocks import Conv2d, ConvTranspose2d, FromLatents, UpBlock, resnet_widths


class SimpleGenerator(nn.Module):
    """Transposed convolutions, no normalisation. 8 M at 32x32."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        base, count = stages(size)
        widths = [min(8 * width, 2 * width << level) for level in range(count, -1, -1)]
        layers: list[nn.Module] = [FromLatents(latent_dim, widths[0], base), nn.LeakyReLU(0.2)]
        for inside, outside in pairwise(widths):
            layers += [ConvTranspose2d(inside, outside, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, Conv2d(widths[-1], channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        """(B, d) latents -> (B, C, H, W) images."""
        return torch.tanh(self.layers(z).to(z.dtype))


class ResnetGenerator(nn.Module):
    """A linear layer, residual up-blocks with BatchNorm, conv3, tanh. 16 M at 32x32, nef 512."""

    def __init__(self, size: int, channels: int, nef: int, latent_dim: int) -> None:
        super().__init__()
        self.base, _ = stages(size)
        widths = resnet_widths(size, nef)
        self.start = nn.Linear(latent_dim, widths[0] * self.base**2)
        self.blocks = nn.Sequential(*(UpBlock(inside, outside) for inside, outside in pairwise(widths)))
        self.norm = BatchNorm2d(widths[-1])
        self.out = Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """(B, d) latents -> (B, C, H, W) images."""
        h = self.start(z).unflatten(1, (-1, self.base, self.base))
        return torch.tanh(self.out(F.relu(self.norm(self.blocks(h)))).to(z.dtype))
