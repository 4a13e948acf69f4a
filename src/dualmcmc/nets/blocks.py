"""Parts shared by the three networks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc.config import stages


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


class DownBlock(nn.Module):
    """E's residual block: [ReLU -] conv3 - ReLU - conv3 [- avg-pool 2], plus a shortcut.

    The shortcut is a 1x1 convolution where the width changes or the map shrinks. It pools first:
    a mean and a 1x1 convolution commute, and this order costs a quarter.
    """

    def __init__(self, inside: int, outside: int, down: bool, first: bool = False) -> None:
        super().__init__()
        self.down, self.first = down, first
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False) if down or inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.down:
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)
        return h + (x if self.shortcut is None else self.shortcut(x))


class Upsample(nn.Module):
    """Bilinear x2, as two small matrix products: far cheaper to differentiate than the interpolation
    operator on a GPU, and deterministic there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("matrix", self._matrix(size), persistent=False)
        self.matrix: Tensor

    @staticmethod
    def _matrix(size: int) -> Tensor:
        """(2 size, size): row i holds the weights of output pixel i (half-pixel centres)."""
        matrix = torch.zeros(2 * size, size)
        for row in range(2 * size):
            centre = (row + 0.5) / 2 - 0.5
            low = int(centre // 1)
            for column, weight in ((low, low + 1 - centre), (low + 1, centre - low)):
                matrix[row, min(max(column, 0), size - 1)] += weight
        return matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix @ x @ self.matrix.T


class UpBlock(nn.Module):
    """G's residual block: BN - ReLU - up x2 - conv3 - BN - ReLU - conv3, plus up x2 of a 1x1.

    The shortcut convolves first: a 1x1 convolution and an interpolation commute, and this order
    costs a quarter.
    """

    def __init__(self, inside: int, outside: int, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1)
        self.up = Upsample(size)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.up(F.relu(self.norm1(x))))
        h = self.conv2(F.relu(self.norm2(h)))
        return h + self.up(self.shortcut(x))
