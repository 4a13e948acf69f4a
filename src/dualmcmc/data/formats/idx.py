"""MNIST and Fashion-MNIST: IDX files, plain or gzipped, in a folder or an archive."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dualmcmc.data.formats.official import one_file_per_split
from dualmcmc.data.source import ImageSource
from dualmcmc.utils.errors import UserError

FILES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}


def read(path: Path) -> dict[str, ImageSource]:
    """The splits whose files exist."""
    return one_file_per_split(path, FILES, parse_idx)


def parse_idx(content: bytes, where: str) -> np.ndarray:
    """(N, H, W, 1) uint8 from an IDX file: the bytes 0, 0, 8 (uint8), 3 (dimensions), the shape, the pixels."""
    if len(content) < 16 or content[:4] != b"\0\0\x08\x03":
        raise UserError(f"'{where}' is not an IDX file of images.")
    shape = [int.from_bytes(content[at : at + 4], "big") for at in (4, 8, 12)]
    if len(content) != 16 + math.prod(shape) or 0 in shape:
        raise UserError(f"'{where}' is truncated or damaged: {len(content):,} bytes for shape {shape}.")
    return np.frombuffer(content, np.uint8, offset=16).reshape(*shape, 1)
