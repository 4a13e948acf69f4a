"""Parts shared by the three networks.

The convolutions here may be given weights of a coarser type than their input: `nets/evaluator.py` does, for speed.
Torch's own layers, where a network uses one, keep float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc.config import stages
from dualmcmc.nets.batchnorm import BatchNorm2d

IMAGE_CHANNELS = 4  # a map of no more is an image, not features


def resnet_widths(size: int, nef: int) -> list[int]:
    """Channels of the n + 1 maps of a resnet, from the smallest map to the image.

    Up to 32 pixels all are `nef`; above, they halve towards the image down to 64, as the authors'
    64-pixel networks (1024, 512, 256, 128, 64).
    """
    _, count = stages(size)
    if size <= 32:
        return [nef] * (count + 1)
    return [max(nef >> level, min(nef, 64)) for level in range(count + 1)]


def initialise(net: nn.Module, batchnorm_gain: str = "ones") -> None:
    """Xavier-normal convolutions with zero biases; BatchNorm gains N(0,1) ("normal") or 1."""
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


def taken_by(kernel: Tensor, x: Tensor) -> Tensor:
    """`x` in the type of the weights, and with its channels last where theirs are: else the kernels copy it first."""
    last = kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()
    return x.to(kernel.dtype, memory_format=torch.channels_last if last else torch.preserve_format)


class Conv2d(nn.Conv2d):
    """A convolution in the type of its weights, whatever the type of its input.

    Where that is bfloat16, images are better: they go in as float32 and come out of features as float32.
    """

    def kernel(self) -> Tensor:
        """The weights it convolves with."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel()
        if self._keeps_size and kernel.dtype == torch.bfloat16:
            if x.dtype != kernel.dtype and x.shape[1] <= IMAGE_CHANNELS:
                return convolve_image(x, kernel, self.bias)
            if len(kernel) <= IMAGE_CHANNELS:
                return convolve_to_image(x.to(kernel.dtype), kernel, self.bias)
        return F.conv2d(taken_by(kernel, x), kernel, self.bias, self.stride, self.padding)

    @property
    def _keeps_size(self) -> bool:
        side, width = self.kernel_size
        return side == width and side % 2 == 1 and self.stride == (1, 1) and self.padding == (side // 2, side // 2)


class PooledConv2d(Conv2d):
    """conv3, then average-pool 2, as one conv4 of stride 2: the same function for 4/9 of the work.

    Learns the 3x3 weights; `kernel` folds the pooling into them. Weights given as 4x4 are folded already.
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(inside, outside, 3, stride=2, padding=1, bias=False)

    def kernel(self) -> Tensor:
        weight = self.weight
        return weight if weight.shape[-1] == 4 else F.avg_pool2d(F.pad(weight, (1, 1, 1, 1)), 2, stride=1)


class ConvTranspose2d(nn.ConvTranspose2d):
    """A transposed convolution in the type of its weights, whatever the type of its input."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(taken_by(self.weight, x), output_size)


class FromLatents(nn.ConvTranspose2d):
    """The transposed convolution that makes the smallest map of a latent, (B, d) -> (B, C, k, k): a matrix product."""

    def forward(self, z: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert self.bias is not None
        return (z @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:]) + self.bias[:, None, None]


def convolve_image(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution (stride 1, same size) of images that are finer than its weights, float32 and bfloat16.

    An image goes in twice, rounded and what rounding lost: one Langevin step moves a pixel by less than bfloat16 can
    tell near 1. And as one matrix product of its patches: kernels for convolutions are slow with three channels.
    """
    side = kernel.shape[-1]
    rounded = x.detach().to(kernel.dtype)
    both = F.pad(torch.cat([rounded, (x - rounded).to(kernel.dtype)], 1), [side // 2] * 4)
    height, width = x.shape[2:]
    shifts = [both[:, :, row : row + height, column : column + width] for row, column in product(range(side), repeat=2)]
    patches = torch.cat(shifts, 1).permute(0, 2, 3, 1).flatten(0, 2)  # (pixels, shifts x 2 channels)
    table = kernel.repeat(1, 2, 1, 1).permute(2, 3, 1, 0).flatten(0, 2)  # (shifts x 2 channels, outside)
    fill = -len(table) % 8  # up to a number that matrix units take
    made = F.pad(patches, (0, fill)) @ F.pad(table, (0, 0, 0, fill))
    made = made if bias is None else made + bias
    return made.unflatten(0, (len(x), height, width)).permute(0, 3, 1, 2)


def convolve_to_image(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution (stride 1, same size) that makes an image, as float32: `convolve_image` the other way round.

    One matrix product gives what each pixel adds to those around it; these are then added up.
    """
    channels, _, side, _ = kernel.shape
    height, width = x.shape[2:]
    table = kernel.permute(1, 2, 3, 0).flatten(1)  # (inside, shifts x channels)
    table = F.pad(table, (0, -table.shape[1] % 8))  # up to a number that matrix units take
    given = (x.permute(0, 2, 3, 1).flatten(0, 2) @ table).unflatten(0, (len(x), height, width))
    given = F.pad(given, [0, 0] + [side // 2] * 4)
    made = torch.zeros(channels, device=x.device) if bias is None else bias.float()
    for shift, (row, column) in enumerate(product(range(side), repeat=2)):
        there = given[:, row : row + height, column : column + width]
        made = made + there.narrow(3, shift * channels, channels).float()
    return made.permute(0, 3, 1, 2)


class DownBlock(nn.Module):
    """E's residual block: [ReLU -] conv3 - ReLU - conv3 [- avg-pool 2], plus a shortcut.

    The shortcut is a 1x1 convolution where the width changes or the map shrinks. It pools first:
    a mean and a 1x1 convolution commute, and this order costs a quarter.
    """

    def __init__(self, inside: int, outside: int, down: bool, first: bool = False) -> None:
        super().__init__()
        self.down, self.first = down, first
        self.conv1 = Conv2d(inside, outside, 3, padding=1, bias=False)
        self.conv2 = PooledConv2d(outside, outside) if down else Conv2d(outside, outside, 3, padding=1, bias=False)
        self.shortcut = Conv2d(inside, outside, 1, bias=False) if down or inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.down:
            x = F.avg_pool2d(x, 2)
        return h + (x if self.shortcut is None else self.shortcut(x))


class Upsample(nn.Module):
    """Bilinear x2. Deterministic on a GPU, where a compiler melts it into its neighbours."""

    def forward(self, x: Tensor) -> Tensor:
        # Channels last, as GPUs like their convolutions.
        return _doubled(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Doubled(torch.autograd.Function):
    """(B, H, W, C) -> (B, 2H, 2W, C), half-pixel centres: a new pixel is 3/4 of the one it lies in, 1/4 of the next.

    The gradient is stated, as a sum over where each pixel went: torch would scatter it, with atomic additions.
    There are no rules for `torch.func.jvp` and `vmap`.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        for axis in (1, 2):
            size = x.shape[axis]
            new = torch.arange(2 * size, device=x.device)
            inside = new // 2
            beside = (inside + 2 * (new % 2) - 1).clamp(0, size - 1)
            x = 0.75 * x.index_select(axis, inside) + 0.25 * x.index_select(axis, beside)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for axis in (1, 2):
            size = gradient.shape[axis]
            first, pick = 2 * torch.arange(size // 2, device=gradient.device), partial(gradient.index_select, axis)
            beside = pick((first - 1).clamp(min=0)) + pick((first + 2).clamp(max=size - 1))
            gradient = 0.75 * (pick(first) + pick(first + 1)) + 0.25 * beside
        return gradient


_doubled: Callable[[Tensor], Tensor] = _Doubled.apply


class UpBlock(nn.Module):
    """G's residual block: BN - ReLU - up x2 - conv3 - BN - ReLU - conv3, plus up x2 of a 1x1.

    The shortcut convolves first: a 1x1 convolution and an interpolation commute, and this order
    costs a quarter.
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = BatchNorm2d(inside), BatchNorm2d(outside)
        self.conv1 = Conv2d(inside, outside, 3, padding=1)
        self.conv2 = Conv2d(outside, outside, 3, padding=1)
        self.shortcut = Conv2d(inside, outside, 1)
        self.up = Upsample()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.up(F.relu(self.norm1(x))))
        h = self.conv2(F.relu(self.norm2(h)))
        return h + self.up(self.shortcut(x))
