"""MNIST and Fashion-MNIST: IDX files, plain or gzipped, in a folder or an archive."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dualmcmc.data.bundle import file_a_split
from dualmcmc.data.source import Source
from dualmcmc.errors import UserError

FILES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}


def read(path: Path) -> dict[str, Source]:
    """The splits whose files are there."""
    return file_a_split(path, FILES, parse_idx)


def parse_idx(content: bytes, where: str) -> np.ndarray:
    """(N, H, W, 1) bytes of an IDX file: two zeros, type 8 (bytes), three sides, the pixels."""
    if len(content) < 16 or content[:4] != b"\0\0\x08\x03":
        raise UserError(f"'{where}' is not an IDX file of images.")
    sides = [int.from_bytes(content[at : at + 4], "big") for at in (4, 8, 12)]
    if len(content) != 16 + math.prod(sides) or 0 in sides:
        raise UserError(f"'{where}' is cut short or damaged: {len(content):,} bytes for {sides} pixels.")
    return np.frombuffer(content, np.uint8, offset=16).reshape(*sides, 1)
