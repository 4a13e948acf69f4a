"""Images as bytes, wherever they lie: in memory, in a packed file, or a choice of either."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class Store(ABC):
    """N images of one shape that can be read in any order, also from several threads."""

    shape: tuple[int, int, int, int]  # N, C, H, W

    @property
    @abstractmethod
    def checksum(self) -> str:
        """Of all pixels and their order, in hexadecimal; the same wherever the images lie."""

    @abstractmethod
    def read(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Images number `indices` into `out`, (len(indices), C, H, W) bytes."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """What all of them take in memory."""
        return int(np.prod(self.shape, dtype=np.int64))

    def take(self, indices: np.ndarray | Tensor | Sequence[int]) -> Tensor:
        """Images number `indices`, (len(indices), C, H, W) bytes."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"images {wanted.min()} to {wanted.max()} of {len(self)}")
        out = np.empty((len(wanted), *self.shape[1:]), np.uint8)
        self.read(wanted, out)
        return torch.from_numpy(out)

    def first(self, count: int) -> Tensor:
        """The first `count`, or all where there are fewer."""
        return self.take(np.arange(min(count, len(self))))

    def tensor(self) -> Tensor:
        """All of them."""
        return self.first(len(self))


class Memory(Store):
    """Images in one tensor."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels.contiguous()
        count, channels, height, width = pixels.shape
        self.shape = (count, channels, height, width)

    @cached_property
    def checksum(self) -> str:  # noqa: D102
        return hashlib.sha256(self.pixels.numpy().data).hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        np.take(self.pixels.numpy(), indices, axis=0, out=out, mode="clip")  # clip: writes straight into out

    def tensor(self) -> Tensor:  # noqa: D102
        return self.pixels


class Subset(Store):
    """Some images of another store."""

    def __init__(self, whole: Store, indices: np.ndarray) -> None:
        self.whole, self.indices = whole, indices.astype(np.int64)
        self.shape = (len(indices), *whole.shape[1:])

    @cached_property
    def checksum(self) -> str:  # noqa: D102
        return hashlib.sha256(self.whole.checksum.encode() + self.indices.tobytes()).hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        self.whole.read(self.indices[indices], out)


class Joined(Store):
    """Several stores, one after the other."""

    def __init__(self, parts: Sequence[Store]) -> None:
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
