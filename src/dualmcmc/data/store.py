"""Image stores: random access to training samples in memory, in a packed file, or in parts of either."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class ImageStore(ABC):
    """N samples of one shape, readable in any order and from several threads: uint8 images, or floats of any shape."""

    shape: tuple[int, ...]  # N, C, H, W of images
    dtype: torch.dtype = torch.uint8  # or torch.float32

    @property
    @abstractmethod
    def checksum(self) -> str:
        """Hexadecimal checksum of all pixels in order; the same in memory and in a packed file."""

    @abstractmethod
    def read(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Read the images at `indices` into `out`, (len(indices), C, H, W), an array of the store's type."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Size of all images in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def take(self, indices: np.ndarray | Tensor | Sequence[int]) -> Tensor:
        """The images at `indices`, (len(indices), C, H, W)."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"indices {wanted.min()} to {wanted.max()} are out of range for {len(self)} images")
        out = torch.empty((len(wanted), *self.shape[1:]), dtype=self.dtype)
        self.read(wanted, out.numpy())
        return out

    def first(self, count: int) -> Tensor:
        """The first `count` images, or all if there are fewer."""
        return self.take(np.arange(min(count, len(self))))

    def tensor(self) -> Tensor:
        """All images."""
        return self.first(len(self))


class MemoryStore(ImageStore):
    """Images in one tensor."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels.contiguous()
        self.shape, self.dtype = tuple(pixels.shape), pixels.dtype

    @cached_property
    def checksum(self) -> str:  # noqa: D102
        return hashlib.sha256(self.pixels.numpy().data).hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        np.take(self.pixels.numpy(), indices, axis=0, out=out, mode="clip")  # other modes buffer `out`

    def tensor(self) -> Tensor:  # noqa: D102
        return self.pixels


class SubsetStore(ImageStore):
    """The images of another store at `indices`."""

    def __init__(self, base: ImageStore, indices: np.ndarray) -> None:
        self.base, self.indices = base, indices.astype(np.int64)
        self.shape, self.dtype = (len(indices), *base.shape[1:]), base.dtype

    @cached_property
    def checksum(self) -> str:  # noqa: D102
        return hashlib.sha256(self.base.checksum.encode() + self.indices.tobytes()).hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        self.base.read(self.indices[indices], out)


class ConcatStore(ImageStore):
    """Several stores, one after the other."""

    def __init__(self, parts: Sequence[ImageStore]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.shape = (int(self.ends[-1]), *parts[0].shape[1:])

    @cached_property
    def checksum(self) -> str:  # noqa: D102
        return hashlib.sha256("".join(part.checksum for part in self.parts).encode()).hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        owner = np.searchsorted(self.ends, indices, side="right")
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(owner == number)
            if len(mine):
                out[mine] = part.take(indices[mine] - (self.ends[number] - len(part))).numpy()
