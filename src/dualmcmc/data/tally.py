"""Checksums of decoded pixels, one image at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np


class Tally:
    """Counts images and sums them up, whatever order they come in."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def add(self, image: np.ndarray) -> bytes:
        """Take note of one (C, H, W) image; returns its digest."""
        digest = hashlib.sha256(repr(image.shape).encode() + np.ascontiguousarray(image).tobytes()).digest()
        self.digests.append(digest)
        return digest

    def through(self, images: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The same images, noted as they pass."""
        for image in images:
            self.add(image)
            yield image

    @property
    def checksum(self) -> str:
        """SHA-256 of the sorted digests: the same for the same images in any order."""
        return hashlib.sha256(b"".join(sorted(self.digests))).hexdigest()
