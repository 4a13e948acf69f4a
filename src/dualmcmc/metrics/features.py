"""Byte images to feature vectors, as FID asks for them: TensorFlow 1's resize to 299x299, then Inception.

Only files with a known checksum are read without more ado: one of the two published ones is TorchScript,
which is code.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import torch
from torch import Tensor, nn

from dualmcmc.data import weights
from dualmcmc.data.weights import PACKAGE, RELEASE
from dualmcmc.errors import UserError, first_line
from dualmcmc.metrics.inception import FEATURES, Inception, from_tensors
from dualmcmc.precision import exact_float32

SIDE = 299  # pixels Inception takes


class Features:
    """A network that turns images into vectors.

    `standard`: whether it is FID's own, so that its numbers may be called FID. `checksum`: of its file.
    """

    def __init__(
        self, net: nn.Module, dimension: int, device: torch.device | str, standard: bool, checksum: str
    ) -> None:
        self.device = torch.device(device)
        self.dimension, self.standard, self.checksum = dimension, standard, checksum
        self._net = net.to(self.device).eval()
        self._at_once = 250 if self.device.type == "cuda" else 32  # a 299x299 image takes tens of megabytes

    def __call__(self, images: Tensor) -> Tensor:
        """(N, C, H, W) bytes, grey or RGB, to (N, D) in single precision."""
        if images.dtype != torch.uint8:
            raise TypeError(f"features are taken of bytes, not of {images.dtype}")
        with torch.no_grad(), exact_float32():  # tf32 is twice as fast and moved FID by 0.0004
            return torch.cat([self._net(self._prepared(part)).float() for part in images.split(self._at_once)])

    @property
    def distance_name(self) -> str:
        """What the Fréchet distance on these features may be called."""
        return "fid" if self.standard else "frechet_own_network"

    @property
    def has_classifier(self) -> bool:
        """Whether class scores can be had of the features."""
        return isinstance(self._net, Inception) and self._net.head is not None

    def class_scores(self, features: Tensor) -> Tensor:
        """(N, 1008) of (N, 2048): without the bias, as the Inception Score was defined."""
        assert isinstance(self._net, Inception)
        assert self._net.head is not None
        return features @ self._net.head.to(features).T

    def _prepared(self, images: Tensor) -> Tensor:
        x = images.to(self.device).float().expand(-1, 3, -1, -1)
        x = resize_as_tensorflow(x, SIDE)
        return (x - 128) / 128


def resize_as_tensorflow(x: Tensor, side: int) -> Tensor:
    """Bilinear, output pixel i at input position i * input / side, as TensorFlow 1 does: (N, C, side, side)."""
    down, across = (_weights(size, side).to(x) for size in x.shape[2:])
    return down @ x @ across.T


def _weights(size: int, side: int) -> Tensor:
    """(side, size): row i has the weights of the two input pixels around position i * size / side."""
    position = torch.arange(side, dtype=torch.float64) * (size / side)
    low = position.floor().long()
    high = (low + 1).clamp(max=size - 1)
    share = position - low
    rows = torch.arange(side)
    table = torch.zeros(side, size, dtype=torch.float64)
    table.index_put_((rows, low), 1 - share, accumulate=True)
    table.index_put_((rows, high), share, accumulate=True)
    return table


def load_features(path: Path | None = None, device: torch.device | str = "cpu", trust: bool = False) -> Features:
    """FID's network, from where it was fetched to or from a file with a known checksum; with `trust`, any TorchScript.

    Such a module takes (N, 3, 299, 299) floats, (pixel - 128) / 128, and gives (N, D). It is code: only
    trust what you made or know. Its numbers are not FID and are not called so.
    """
    path, trust = (weights.find(), False) if path is None else (Path(path), trust)
    if not path.is_file():
        raise UserError(f"there is no file '{path}'.")
    content = path.read_bytes()  # once: what is checked is what is loaded
    checksum = hashlib.sha256(content).hexdigest()
    if checksum in (RELEASE, PACKAGE):
        return Features(_read_pinned(io.BytesIO(content), checksum), FEATURES, device, True, checksum)
    if not trust:
        raise UserError(
            f"'{path}' is none of the published Inception files (SHA-256 {checksum[:16]}...): 'dualmcmc data fetch "
            "inception' gets one. If it is your own TorchScript, which is code, add --trust-inception."
        )
    try:
        net = torch.jit.load(io.BytesIO(content), map_location="cpu").eval()
        with torch.no_grad():
            example = net(torch.zeros(2, 3, SIDE, SIDE))
        if example.ndim != 2 or len(example) != 2:
            raise UserError(f"'{path}' gives {tuple(example.shape)} for two images: needed are two rows of features.")
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(f"'{path}' cannot be used as a feature network: {first_line(error)}.") from None
    return Features(net, example.shape[1], device, False, checksum)


def _read_pinned(content: io.BytesIO, checksum: str) -> Inception:
    if checksum == RELEASE:
        return from_tensors(torch.load(content, map_location="cpu", weights_only=True))
    return from_tensors(torch.jit.load(content, map_location="cpu").state_dict())
