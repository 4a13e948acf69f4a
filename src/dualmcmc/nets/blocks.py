"""Parts shared by the three networks.

The convolutions here may be given weights of a coarser type than their input: `nets/evaluator.py` does, for speed.
Torch's own layers, where a network uses one, keep float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc.config import stages

IMAGE_CHANNELS = 8  # an image's channels, twice, and zeros up to here; inputs with more are features


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


class Conv2d(nn.Conv2d):
    """A convolution in the type of its weights, whatever the type of its input (see `fitted`)."""

    def kernel(self) -> Tensor:
        """The weights it convolves with."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(*fitted(x, self.kernel()), self.bias, self.stride, self.padding)


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
        return super().forward(x.to(self.weight.dtype), output_size)


class FromLatents(nn.ConvTranspose2d):
    """The transposed convolution that makes the smallest map of a latent, (B, d) -> (B, C, k, k): a matrix product."""

    def forward(self, z: Tensor, output_size: list[int] | None = None) -> Tensor:
        assert self.bias is not None
        return (z @ self.weight.flatten(1)).unflatten(1, self.weight.shape[1:]) + self.bias[:, None, None]


def fitted(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """An input and the weights it meets, both of the weights' type.

    An image that is finer than the weights (float32 and bfloat16) goes in twice, rounded and what rounding lost:
    one Langevin step moves a pixel by less than bfloat16 can tell near 1. Zeros fill up to a number of channels that
    the fast kernels take.
    """
    if x.dtype == weight.dtype:
        return x, weight
    channels = x.shape[1]
    if 2 * channels > IMAGE_CHANNELS:
        return x.to(weight.dtype), weight
    rounded = x.detach().to(weight.dtype)
    fill = (0, 0, 0, 0, 0, IMAGE_CHANNELS - 2 * channels)
    return F.pad(torch.cat([rounded, (x - rounded).to(weight.dtype)], 1), fill), F.pad(weight.repeat(1, 2, 1, 1), fill)


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
    """Bilinear x2 (half-pixel centres), far cheaper to differentiate than torch's operator on a GPU, and deterministic.

    As it is, two small matrix products, channels last, as GPUs like their convolutions. Compiled, sums of a few
    neighbours in both directions, which fuse with what comes before and after.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        matrix = self._matrix(size)
        self.register_buffer("matrix", matrix, persistent=False)
        self.matrix: Tensor
        for name, table, most in (("forth", matrix, 2), ("back", matrix.T, 4)):
            index, weight = _neighbours(table, most)
            self.register_buffer(f"{name}_index", index, persistent=False)
            self.register_buffer(f"{name}_weight", weight, persistent=False)

    @staticmethod
    def _matrix(size: int) -> Tensor:
        """(2 size, size): row i holds the weights of output pixel i."""
        matrix = torch.zeros(2 * size, size)
        for row in range(2 * size):
            centre = (row + 0.5) / 2 - 0.5
            low = int(centre // 1)
            for column, weight in ((low, low + 1 - centre), (low + 1, centre - low)):
                matrix[row, min(max(column, 0), size - 1)] += weight
        return matrix

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.by_neighbours(x)
        return self.by_products(x)

    def by_products(self, x: Tensor) -> Tensor:
        """As matrix products."""
        count, channels, size, _ = x.shape
        matrix = self.matrix.to(x.dtype)  # eighths: exact in any type
        rows = matrix @ x.permute(0, 2, 3, 1).reshape(count, size, size * channels)
        both = matrix @ rows.reshape(count * 2 * size, size, channels)
        return both.reshape(count, 2 * size, 2 * size, channels).permute(0, 3, 1, 2)

    def by_neighbours(self, x: Tensor) -> Tensor:
        """As sums of neighbours."""
        tables = [self.get_buffer(f"{way}_{what}") for way in ("forth", "back") for what in ("index", "weight")]
        return _Neighbours.apply(x, *tables)  # type: ignore[no-untyped-call]


def _neighbours(table: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(rows, most): of each row of a table the columns that are not 0, and their weights; filled up with 0."""
    weight, index = table.sort(dim=1, descending=True, stable=True)
    assert not weight[:, most:].any()
    return index[:, :most].contiguous(), weight[:, :most].contiguous()


class _Neighbours(torch.autograd.Function):
    """A linear map of rows and of columns that looks at few neighbours, and so does its transpose."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, weight: Tensor, back_index: Tensor, back_weight: Tensor) -> Tensor:
        return _mixed(x, index, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _mixed(gradient, *ctx.saved_tensors), None, None, None, None


def _mixed(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    for dim, shape in ((2, (-1, 1)), (3, (-1,))):
        terms = [
            x.index_select(dim, index[:, i]) * weight[:, i].to(x.dtype).reshape(shape) for i in range(index.shape[1])
        ]
        x = sum(terms[1:], terms[0])
    return x


class UpBlock(nn.Module):
    """G's residual block: BN - ReLU - up x2 - conv3 - BN - ReLU - conv3, plus up x2 of a 1x1.

    The shortcut convolves first: a 1x1 convolution and an interpolation commute, and this order
    costs a quarter.
    """

    def __init__(self, inside: int, outside: int, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1 = Conv2d(inside, outside, 3, padding=1)
        self.conv2 = Conv2d(outside, outside, 3, padding=1)
        self.shortcut = Conv2d(inside, outside, 1)
        self.up = Upsample(size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.up(F.relu(self.norm1(x))))
        h = self.conv2(F.relu(self.norm2(h)))
        return h + self.up(self.shortcut(x))
