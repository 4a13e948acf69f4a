"""FID's Inception-v3: the network of the 2015-12-05 TensorFlow graph, from 299x299 pixels to 2,048 features.

It differs from later Inceptions in its average pools, which leave the padding out, in a maximum pool in
the last block, and in its 1,008 classes (Szegedy et al., 2016; Heusel et al., 2017). BatchNorm has no
gain there and never changes, so each convolution carries it in its weights and bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

FEATURES = 2048
EPSILON = 0.001  # of its BatchNorm
_Shape = int | tuple[int, int]


class Conv(nn.Conv2d):
    """Convolution with the folded BatchNorm, then ReLU."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return super().forward(x).relu_()


class Branches(nn.ModuleList):
    """Several ways from the same maps, their results side by side."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([way(x) for way in self], 1)


def _conv(inside: int, outside: int, kernel: _Shape, stride: int = 1, padding: _Shape | None = None) -> Conv:
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    same = (size[0] // 2, size[1] // 2)
    return Conv(inside, outside, size, stride, same if padding is None else padding)


def _way(inside: int, *layers: tuple[int, _Shape]) -> nn.Sequential:
    """Convolutions one after the other, each (channels, kernel)."""
    parts = []
    for outside, kernel in layers:
        parts.append(_conv(inside, outside, kernel))
        inside = outside
    return nn.Sequential(*parts)


def _average(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), _conv(inside, outside, 1))


def _at_35(inside: int, pooled: int) -> Branches:
    return Branches(
        [
            _conv(inside, 64, 1),
            _way(inside, (48, 1), (64, 5)),
            _way(inside, (64, 1), (96, 3), (96, 3)),
            _average(inside, pooled),
        ]
    )


def _to_17() -> Branches:
    return Branches(
        [
            _conv(288, 384, 3, 2, 0),
            nn.Sequential(*_way(288, (64, 1), (96, 3)), _conv(96, 96, 3, 2, 0)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _at_17(c: int) -> Branches:
    return Branches(
        [
            _conv(768, 192, 1),
            _way(768, (c, 1), (c, (1, 7)), (192, (7, 1))),
            _way(768, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))),
            _average(768, 192),
        ]
    )


def _to_8() -> Branches:
    return Branches(
        [
            nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, 2, 0)),
            nn.Sequential(*_way(768, (192, 1), (192, (1, 7)), (192, (7, 1))), _conv(192, 192, 3, 2, 0)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _at_8(inside: int, pool: nn.Module) -> Branches:
    def fork() -> Branches:
        return Branches([_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))])

    return Branches(
        [
            _conv(inside, 320, 1),
            nn.Sequential(_conv(inside, 384, 1), fork()),
            nn.Sequential(_conv(inside, 448, 1), _conv(448, 384, 3), fork()),
            nn.Sequential(pool, _conv(inside, 192, 1)),
        ]
    )


class Inception(nn.Module):
    """(N, 3, 299, 299), as (pixel - 128) / 128, to (N, 2048); `head` (1008, 2048) where the classifier is known."""

    head: Tensor | None

    def __init__(self, head: Tensor | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(3, 32, 3, 2, 0),
            _conv(32, 32, 3, 1, 0),
            _conv(32, 64, 3),
            nn.MaxPool2d(3, 2),
            _conv(64, 80, 1),
            _conv(80, 192, 3, 1, 0),
            nn.MaxPool2d(3, 2),
            _at_35(192, 32),
            _at_35(256, 64),
            _at_35(288, 64),
            _to_17(),
            _at_17(128),
            _at_17(160),
            _at_17(160),
            _at_17(192),
            _to_8(),
            _at_8(1280, nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
            _at_8(2048, nn.MaxPool2d(3, 1, 1)),
        )
        self.register_buffer("head", head)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.body(x).mean((2, 3))

    def convolutions(self) -> Iterator[Conv]:
        """All 94, in the order of both published layouts."""
        return (module for module in self.body.modules() if isinstance(module, Conv))


def from_tensors(tensors: Mapping[str, Tensor]) -> Inception:
    """The network with published weights, in either layout that is in use.

    The one of pytorch-fid and torch-fidelity names its layers as torchvision does and has the classifier;
    the other is in the order of the TensorFlow graph and ends at the features.
    """
    if "fc.weight" in tensors:
        net = Inception(head=tensors["fc.weight"].float())
        layers = [
            (tensors[f"{name}.conv.weight"], *(tensors[f"{name}.bn.{part}"] for part in _BATCHNORM))
            for name in _layer_names()
        ]
    else:
        net = Inception()
        names = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        layers = [
            (
                tensors[f"{name}.weight"],
                torch.ones_like(tensors[f"{name}.beta"]),
                *(tensors[f"{name}.{part}"] for part in ("beta", "mean", "var")),
            )
            for name in names
        ]
    for conv, (weight, gain, shift, mean, variance) in zip(net.convolutions(), layers, strict=True):
        if weight.shape != conv.weight.shape:
            raise ValueError(f"a layer of {tuple(weight.shape)} where {tuple(conv.weight.shape)} belongs")
        factor = gain.double() / (variance.double() + EPSILON).sqrt()
        assert conv.bias is not None
        with torch.no_grad():
            conv.weight.copy_(weight.double() * factor[:, None, None, None])
            conv.bias.copy_(shift.double() - mean.double() * factor)
    return net.eval().requires_grad_(False)


_BATCHNORM = ("weight", "bias", "running_mean", "running_var")
_FORKS = {
    "A": "branch1x1 branch5x5_1 branch5x5_2 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3 branch_pool",
    "B": "branch3x3 branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3",
    "C": "branch1x1 branch7x7_1 branch7x7_2 branch7x7_3 branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 branch7x7dbl_4 "
    "branch7x7dbl_5 branch_pool",
    "D": "branch3x3_1 branch3x3_2 branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4",
    "E": "branch1x1 branch3x3_1 branch3x3_2a branch3x3_2b branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3a "
    "branch3x3dbl_3b branch_pool",
}
_BLOCKS = {"5b": "A", "5c": "A", "5d": "A", "6a": "B"} | dict.fromkeys(("6b", "6c", "6d", "6e"), "C")
_BLOCKS |= {"7a": "D", "7b": "E", "7c": "E"}


def _layer_names() -> Iterator[str]:
    """torchvision's names of the convolutions, in order."""
    yield from (f"Conv2d_{name}" for name in ("1a_3x3", "2a_3x3", "2b_3x3", "3b_1x1", "4a_3x3"))
    for block, kind in _BLOCKS.items():
        yield from (f"Mixed_{block}.{part}" for part in _FORKS[kind].split())
