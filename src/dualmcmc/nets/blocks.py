"""Building blocks of the three networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc.utils.geometry import downsampling_stages


def resnet_widths(size: int, nef: int) -> list[int]:
    """Channels of the n + 1 feature maps of a resnet, from the smallest map to the image.

    Up to 32 pixels all are `nef`; above, they halve towards the image down to 64, like the authors' 64-pixel
    networks (1024, 512, 256, 128, 64).
    """
    _, count = downsampling_stages(size)
    if size <= 32:
        return [nef] * (count + 1)
    return [max(nef >> level, min(nef, 64)) for level in range(count + 1)]


def initialize(net: nn.Module, batchnorm_gain: str = "ones") -> None:
    """Xavier-normal convolutions with zero biases; BatchNorm gains from N(0, 1) ("normal") or 1 ("ones")."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d) and batchnorm_gain == "normal":
            nn.init.normal_(module.weight)


def add_spectral_norm(net: nn.Module) -> None:
    """Spectral normalisation of every convolution and linear layer."""
    for module in net.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            spectral_norm(module)


class Gain(nn.Module):
    """Multiplication by a constant that `signal.normalize_signal` sets before training; the identity if disabled."""

    value: Tensor | None

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.register_buffer("value", torch.ones(()) if enabled else None)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.value is None else x * self.value


class Activation(Gain):
    """ReLU, leaky if `negative_slope` is not 0, and a gain."""

    def __init__(self, negative_slope: float = 0.0, gain: bool = False) -> None:
        super().__init__(gain)
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.leaky_relu(x, self.negative_slope) if self.negative_slope else F.relu(x))


class PooledConv2d(nn.Conv2d):
    """A 3x3 convolution followed by 2x2 average pooling, as one 4x4 convolution of stride 2: 4/9 of the work.

    The parameters are the 3x3 weights; `kernel` folds the pooling into them.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 3, stride=2, padding=1, bias=False)

    def kernel(self) -> Tensor:
        """The 4x4 weights."""
        return F.avg_pool2d(F.pad(self.weight, (1, 1, 1, 1)), 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), None, self.stride, self.padding)


class LatentProjection(nn.ConvTranspose2d):
    """The transposed convolution from a latent to the smallest feature map, as a matrix product.

    (B, d) -> (B, C, k, k).
    """

    def forward(self, z: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert self.bias is not None
        return (z @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:]) + self.bias[:, None, None]


class DownBlock(nn.Module):
    """E's residual block: [ReLU -] conv3 - ReLU - conv3 [- avg-pool 2], plus a shortcut.

    The shortcut is a 1x1 convolution if the width changes or the map shrinks. It pools first: a mean and a 1x1
    convolution commute, and this order costs a quarter.
    """

    def __init__(
        self, in_channels: int, out_channels: int, down: bool, first: bool = False, gain: bool = False
    ) -> None:
        super().__init__()
        self.down = down
        self.act1 = nn.Identity() if first else Activation(gain=gain)
        self.act2 = Activation(gain=gain)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = (
            PooledConv2d(out_channels, out_channels)
            if down
            else nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        )
        project = down or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(self.act2(self.conv1(self.act1(x))))
        if self.down:
            x = F.avg_pool2d(x, 2)
        return h + (x if self.shortcut is None else self.shortcut(x))


class UpBlock(nn.Module):
    """G's residual block: BN - ReLU - upsample x2 - conv3 - BN - ReLU - conv3, plus a 1x1 shortcut.

    The shortcut convolves before it upsamples: the two commute, and this order costs a quarter.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(in_channels), nn.BatchNorm2d(out_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)
        self.up = Upsample()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.up(F.relu(self.norm1(x))))
        h = self.conv2(F.relu(self.norm2(h)))
        return h + self.up(self.shortcut(x))


class StyledConv(nn.Module):
    """A convolution whose input channels a style scales, as in StyleGAN2 (Karras et al., 2020); bias; leaky ReLU.

    conv3, or with `up` a transposed conv4 of stride 2. The output is divided by its standard deviation for inputs of
    unit variance, so the signal roughly keeps its size at any depth, whatever the weights, without batch statistics.
    """

    def __init__(self, in_channels: int, out_channels: int, style_dim: int, up: bool = False) -> None:
        super().__init__()
        self.scale = unit_linear(style_dim, in_channels, std=0.5)
        self.conv: nn.Conv2d | nn.ConvTranspose2d = (
            nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)
            if up
            else nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        )
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale = 1 + self.scale(style)
        h = self.conv(x * scale[:, :, None, None].to(x.dtype))
        power = self.conv.weight.to(style.dtype).square().sum((2, 3))
        if isinstance(self.conv, nn.ConvTranspose2d):
            power = power.T / 4  # (in, out) -> (out, in); an output pixel sees a quarter of the kernel
        normalizer = (scale.square() @ power.T + 1e-8).rsqrt()[:, :, None, None]
        return unit_leaky_relu(h * normalizer.to(h.dtype) + self.bias[:, None, None].to(h.dtype))


def unit_linear(in_features: int, out_features: int, std: float = 1.0) -> nn.Linear:
    """A linear layer whose outputs have this standard deviation for inputs of root mean square 1."""
    layer = nn.Linear(in_features, out_features)
    nn.init.normal_(layer.weight, std=std / math.sqrt(in_features))
    nn.init.zeros_(layer.bias)
    return layer


def unit_leaky_relu(x: Tensor) -> Tensor:
    """Leaky ReLU of slope 0.2, scaled so that N(0, 1) keeps its root mean square."""
    return F.leaky_relu(x, 0.2) * math.sqrt(2 / (1 + 0.2**2))


class Upsample(nn.Module):
    """Bilinear x2, deterministic on GPUs and fusible by torch.compile."""

    def forward(self, x: Tensor) -> Tensor:
        # Channels-last, the layout of fast GPU convolutions.
        return _upsample2x(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Upsample2x(torch.autograd.Function):
    """(B, H, W, C) -> (B, 2H, 2W, C) with half-pixel centres: 3/4 of the nearest pixel, 1/4 of the next.

    The backward pass gathers; autograd's own would scatter with atomic additions. There are no rules for
    `torch.func.jvp` and `vmap`.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        for axis in (1, 2):
            size = x.shape[axis]
            index = torch.arange(2 * size, device=x.device)
            nearest = index // 2
            next_nearest = (nearest + 2 * (index % 2) - 1).clamp(0, size - 1)
            x = 0.75 * x.index_select(axis, nearest) + 0.25 * x.index_select(axis, next_nearest)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for axis in (1, 2):
            size = gradient.shape[axis]
            first, take = 2 * torch.arange(size // 2, device=gradient.device), partial(gradient.index_select, axis)
            neighbours = take((first - 1).clamp(min=0)) + take((first + 2).clamp(max=size - 1))
            gradient = 0.75 * (take(first) + take(first + 1)) + 0.25 * neighbours
        return gradient


_upsample2x: Callable[[Tensor], Tensor] = _Upsample2x.apply
