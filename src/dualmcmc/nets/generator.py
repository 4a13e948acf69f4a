"""The generator g_theta(z), the mean of p(x|z) = N(g(z), sigma^2 I), Eq. 4. Images are in [-1, 1]."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualmcmc.nets.blocks import LatentProjection, UpBlock, resnet_widths
from dualmcmc.utils.geometry import downsampling_stages


class SimpleGenerator(nn.Module):
    """Transposed convolutions without normalisation. 8 M parameters at 32x32."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        base, count = downsampling_stages(size)
        widths = [min(8 * width, 2 * width << level) for level in range(count, -1, -1)]
        layers: list[nn.Module] = [LatentProjection(latent_dim, widths[0], base), nn.LeakyReLU(0.2)]
        for in_channels, out_channels in pairwise(widths):
            layers += [nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        """(B, d) latents -> (B, C, H, W) images."""
        return torch.tanh(self.layers(z).to(z.dtype))


class ResnetGenerator(nn.Module):
    """Linear layer, residual up-blocks with BatchNorm, conv3, tanh. 16 M parameters at 32x32 with nef 512."""

    def __init__(self, size: int, channels: int, nef: int, latent_dim: int) -> None:
        super().__init__()
        self.base, _ = downsampling_stages(size)
        widths = resnet_widths(size, nef)
        self.start = nn.Linear(latent_dim, widths[0] * self.base**2)
        self.blocks = nn.Sequential(
            *(UpBlock(in_channels, out_channels) for in_channels, out_channels in pairwise(widths))
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.out = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """(B, d) latents -> (B, C, H, W) images."""
        h = self.start(z).unflatten(1, (-1, self.base, self.base))
        return torch.tanh(self.out(F.relu(self.norm(self.blocks(h)))).to(z.dtype))
