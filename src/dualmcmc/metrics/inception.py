"""FID's Inception-v3: the network of the TensorFlow graph of 2015-12-05, from 299x299 pixels to 2,048 features.

Unlike later versions it excludes the padding from average pools, has a maximum pool in its last block, and has 1,008
classes (Szegedy et al., 2016; Heusel et al., 2017). Its BatchNorm has no gain and constant statistics, so it is folded
into the convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from dualmcmc.utils.device import NumericSettings, exact_float32
from dualmcmc.utils.progress import Advance

FEATURE_DIM = 2048
INPUT_SIZE = 299  # pixels
BATCHNORM_EPS = 0.001
Precision = Literal["float32", "tf32", "float16"]  # of the convolutions
_Size = int | tuple[int, int]


class ConvReLU(nn.Conv2d):
    """Convolution with folded BatchNorm, then ReLU."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if x.is_cuda and x.dtype == torch.float16:  # one kernel instead of three
            assert isinstance(self.padding, tuple)
            settings = self.stride, self.padding, self.dilation, self.groups
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *settings)
        return super().forward(x).relu_()


class Branches(nn.ModuleList):
    """Parallel branches, their outputs concatenated."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([branch(x) for branch in self], 1)


def _conv(in_channels: int, channels: int, kernel: _Size, stride: int = 1, padding: _Size | None = None) -> ConvReLU:
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    same = (size[0] // 2, size[1] // 2)
    return ConvReLU(in_channels, channels, size, stride, same if padding is None else padding)


def _convs(in_channels: int, *layers: tuple[int, _Size]) -> nn.Sequential:
    """A sequence of convolutions, each (channels, kernel)."""
    parts = []
    for channels, kernel in layers:
        parts.append(_conv(in_channels, channels, kernel))
        in_channels = channels
    return nn.Sequential(*parts)


class PooledConvReLU(ConvReLU):
    """3x3 average pool, 1x1 convolution, ReLU; the pool comes second, where there are fewer channels."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        x = functional.conv2d(x, self.weight, self.bias)
        return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False).relu_()


# Blocks A to E, as torchvision calls them.


def _block_a(in_channels: int, pool_channels: int) -> Branches:
    return Branches(
        [
            _conv(in_channels, 64, 1),
            _convs(in_channels, (48, 1), (64, 5)),
            _convs(in_channels, (64, 1), (96, 3), (96, 3)),
            PooledConvReLU(in_channels, pool_channels, 1),
        ]
    )


def _block_b() -> Branches:
    return Branches(
        [
            _conv(288, 384, 3, 2, 0),
            nn.Sequential(*_convs(288, (64, 1), (96, 3)), _conv(96, 96, 3, 2, 0)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _block_c(c: int) -> Branches:
    return Branches(
        [
            _conv(768, 192, 1),
            _convs(768, (c, 1), (c, (1, 7)), (192, (7, 1))),
            _convs(768, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))),
            PooledConvReLU(768, 192, 1),
        ]
    )


def _block_d() -> Branches:
    return Branches(
        [
            nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, 2, 0)),
            nn.Sequential(*_convs(768, (192, 1), (192, (1, 7)), (192, (7, 1))), _conv(192, 192, 3, 2, 0)),
            nn.MaxPool2d(3, 2),
        ]
    )


def _block_e(in_channels: int, pooled: nn.Module) -> Branches:
    def fork() -> Branches:
        return Branches([_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))])

    return Branches(
        [
            _conv(in_channels, 320, 1),
            nn.Sequential(_conv(in_channels, 384, 1), fork()),
            nn.Sequential(_conv(in_channels, 448, 1), _conv(448, 384, 3), fork()),
            pooled,
        ]
    )


class Inception(nn.Module):
    """(N, 3, 299, 299) images, (pixel - 128) / 128, to (N, 2048); `head` (1008, 2048): the classifier, if available."""

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
            _block_a(192, 32),
            _block_a(256, 64),
            _block_a(288, 64),
            _block_b(),
            _block_c(128),
            _block_c(160),
            _block_c(160),
            _block_c(192),
            _block_d(),
            _block_e(1280, PooledConvReLU(1280, 192, 1)),
            _block_e(2048, nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(2048, 192, 1))),
        )
        self.register_buffer("head", head)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.body(x).float().mean((2, 3))

    def convolutions(self) -> Iterator[ConvReLU]:
        """All 94, in the order of both published files."""
        return (module for module in self.body.modules() if isinstance(module, ConvReLU))


def from_tensors(tensors: Mapping[str, Tensor]) -> Inception:
    """The network with the published weights, from either of the two common files.

    The file of pytorch-fid and torch-fidelity uses torchvision's layer names and includes the classifier; the other
    follows the order of the TensorFlow graph and ends at the features.
    """
    if "fc.weight" in tensors:
        net = Inception(head=tensors["fc.weight"].float())
        layers = [
            (tensors[f"{name}.conv.weight"], *(tensors[f"{name}.bn.{part}"] for part in _BATCHNORM))
            for name in layer_names()
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
            raise ValueError(f"a layer has shape {tuple(weight.shape)}, expected {tuple(conv.weight.shape)}")
        factor = gain.double() / (variance.double() + BATCHNORM_EPS).sqrt()
        assert conv.bias is not None
        with torch.no_grad():
            conv.weight.copy_(weight.double() * factor[:, None, None, None])
            conv.bias.copy_(shift.double() - mean.double() * factor)
    return net.eval().requires_grad_(False)


_BATCHNORM = ("weight", "bias", "running_mean", "running_var")
_BRANCHES = {
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


def layer_names() -> Iterator[str]:
    """torchvision's names of the convolutions, in order."""
    yield from (f"Conv2d_{name}" for name in ("1a_3x3", "2a_3x3", "2b_3x3", "3b_1x1", "4a_3x3"))
    for block, kind in _BLOCKS.items():
        yield from (f"Mixed_{block}.{part}" for part in _BRANCHES[kind].split())


class FeatureExtractor:
    """A network from images to feature vectors.

    `standard`: whether it is FID's network, so that its results may be called FID. `checksum`: SHA-256 of its file.
    `precision` other than float32 is for `Inception` alone. `exact`: an extractor of the same features in float32, with
    which `tasks.fid.FeatureSet` corrects the moments of those of this one.
    """

    def __init__(
        self,
        net: nn.Module,
        dimension: int,
        device: torch.device | str,
        standard: bool,
        checksum: str,
        precision: Precision = "float32",
        exact: FeatureExtractor | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dimension, self.standard, self.checksum, self.precision = dimension, standard, checksum, precision
        self.exact = exact
        self.net = net.to(self.device).eval()
        self._dtype = torch.float16 if precision == "float16" else torch.float32
        self._layout = torch.contiguous_format
        if precision != "float32" or (self.device.type == "cpu" and isinstance(net, Inception)):
            assert isinstance(net, Inception)
            self._layout = torch.channels_last  # on a CPU, faster in float32 too
            for conv in net.convolutions():
                assert conv.bias is not None
                conv.weight.data = conv.weight.to(self._dtype, memory_format=self._layout)
                conv.bias.data = conv.bias.to(self._dtype)
        self._batch = 250 if self.device.type == "cuda" else 32  # a 299x299 image needs tens of megabytes

    def __call__(self, images: Tensor, advance: Advance = lambda count: None) -> Tensor:
        """(N, C, H, W) uint8, greyscale or RGB, to (N, D) float32; `advance` counts the images that are done."""
        if images.dtype != torch.uint8:
            raise TypeError(f"images must be uint8, not {images.dtype}")
        with torch.no_grad(), exact_float32():
            if self.precision == "tf32":
                NumericSettings.current()._replace(cudnn_tf32=True).apply()
            rows = []
            for batch in images.split(self._batch):
                rows.append(self.net(self._preprocess(batch)).float())
                advance(len(batch))
            return torch.cat(rows)

    @property
    def metric_name(self) -> str:
        """The name of the Fréchet distance on these features."""
        return "fid" if self.standard else "frechet_custom_network"

    @property
    def has_classifier(self) -> bool:
        """Whether class scores can be computed from the features."""
        return isinstance(self.net, Inception) and self.net.head is not None

    def class_scores(self, features: Tensor) -> Tensor:
        """(N, 2048) to (N, 1008) logits, without the bias, as in the definition of the Inception Score."""
        assert isinstance(self.net, Inception)
        assert self.net.head is not None
        return features @ self.net.head.to(features).T

    def _preprocess(self, images: Tensor) -> Tensor:
        x = images.to(self.device).float().expand(-1, 3, -1, -1)
        x = resize_as_tensorflow(x, INPUT_SIZE)
        return ((x - 128) / 128).to(self._dtype, memory_format=self._layout)


def resize_as_tensorflow(x: Tensor, size: int) -> Tensor:
    """Bilinear to (N, C, size, size) as in TensorFlow 1: output pixel i is at input position i * input_size / size."""
    vertical, horizontal = (_bilinear_weights(length, size).to(x) for length in x.shape[2:])
    return vertical @ x @ horizontal.T


def _bilinear_weights(length: int, size: int) -> Tensor:
    """(size, length): row i contains the weights of the two input pixels around position i * length / size."""
    position = torch.arange(size, dtype=torch.float64) * (length / size)
    low = position.floor().long()
    high = (low + 1).clamp(max=length - 1)
    fraction = position - low
    rows = torch.arange(size)
    table = torch.zeros(size, length, dtype=torch.float64)
    table.index_put_((rows, low), 1 - fraction, accumulate=True)
    table.index_put_((rows, high), fraction, accumulate=True)
    return table
