"""The generator g_theta(z), the mean of p(x|z) = N(g(z), sigma^2 I), Eq. 4. Images are in [-1, 1]."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dualmcmc.nets.blocks import (
    LatentProjection,
    StyledConv,
    UpBlock,
    Upsample,
    resnet_widths,
    unit_leaky_relu,
    unit_linear,
)
from dualmcmc.utils.geometry import downsampling_stages

CONTRAST = 0.4  # gives the images of a new style G about the contrast of natural ones


def plain_widths(size: int, width: int) -> list[int]:
    """Channels of the feature maps of a simple or style G, the smallest map first: 8, 8, 4, 2 widths at 32x32."""
    _, count = downsampling_stages(size)
    return [min(8 * width, 2 * width << level) for level in range(count, -1, -1)]


class SimpleGenerator(nn.Module):
    """Transposed convolutions without normalisation. 8 M parameters at 32x32."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        base, _ = downsampling_stages(size)
        widths = plain_widths(size, width)
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


class StyleGenerator(nn.Module):
    """Convolutions modulated by a style, the image a sum over resolutions: a small StyleGAN2 (Karras et al., 2020).

    The style is a function of z, two layers deep. Unlike in StyleGAN2, the smallest map comes from z as well, so that z
    determines the layout; there are no noise inputs, since g(z) must be a function of z for p(z|x); to-image layers are
    not modulated, up-sampling has no blur filter, and the image passes through tanh.
    14 M parameters at 32x32 with width 64.
    """

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        self.base, _ = downsampling_stages(size)
        widths = plain_widths(size, width)
        self.style = nn.ModuleList(unit_linear(latent_dim, latent_dim) for _ in range(2))
        self.start = unit_linear(latent_dim, widths[0] * self.base**2)
        self.first = StyledConv(widths[0], widths[0], latent_dim)
        self.ups = nn.ModuleList(StyledConv(a, b, latent_dim, up=True) for a, b in pairwise(widths))
        self.convs = nn.ModuleList(StyledConv(b, b, latent_dim) for b in widths[1:])
        self.to_image = nn.ModuleList(nn.Conv2d(b, channels, 1) for b in widths[1:])
        self.upsample = Upsample()

    def forward(self, z: Tensor) -> Tensor:
        """(B, d) latents -> (B, C, H, W) images."""
        style = z
        for layer in self.style:
            style = unit_leaky_relu(layer(style))
        h = self.first(self.start(z).unflatten(1, (-1, self.base, self.base)), style)
        image: Tensor | None = None
        for up, conv, to_image in zip(self.ups, self.convs, self.to_image, strict=True):
            h = conv(up(h, style), style)
            detail = to_image(h).to(z.dtype)
            image = detail if image is None else self.upsample(image) + detail
        assert image is not None
        return torch.tanh(CONTRAST * image)
