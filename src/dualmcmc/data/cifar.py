"""CIFAR-10 and CIFAR-100 in the authors' pickle layout; CIFAR-10 also as tall PNGs, a row an image.

The pickles are read without running anything from them (`pickles.py`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from dualmcmc.data import pickles
from dualmcmc.data.bundle import Bundle
from dualmcmc.data.source import Arrays, Source
from dualmcmc.errors import UserError, first_line

BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
BATCHES_100 = {"train": ("train",), "test": ("test",)}


def read_cifar10(path: Path) -> dict[str, Source]:
    """cifar-10-batches-py/, its tar.gz, or PNG batches, wherever they lie in `path`."""
    return _read(path, BATCHES)


def read_cifar100(path: Path) -> dict[str, Source]:
    """cifar-100-python/ or its tar.gz."""
    return _read(path, BATCHES_100)


def _read(path: Path, batches: Mapping[str, tuple[str, ...]]) -> dict[str, Source]:
    bundle = Bundle(path)
    present = bundle.names()

    def load(files: tuple[str, ...], ending: str) -> np.ndarray:
        contents = bundle.read(*(file + ending for file in files))
        parse = _parse_png if ending else _parse_pickle
        return np.concatenate([parse(contents[file + ending], f"{path}: {file}{ending}") for file in files])

    found: dict[str, Source] = {}
    for split, files in batches.items():
        for ending in ("", ".png"):
            here = [file for file in files if file + ending in present]
            if here and len(here) < len(files):
                missing = ", ".join(file + ending for file in files if file not in here)
                raise UserError(f"'{path}' holds a part of the {split} split only: {missing} missing.")
            if here and split not in found:
                found[split] = Arrays(f"{path}: {split}", partial(load, files, ending))
    return found


def _parse_pickle(content: bytes, where: str) -> np.ndarray:
    """(N, 32, 32, 3) bytes: `data` holds an image a row, its red plane first."""
    batch = pickles.read(content, where)
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"'{where}' is not a CIFAR batch: it holds no N x 3072 array of bytes called data.")
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _parse_png(content: bytes, where: str) -> np.ndarray:
    """(N, 32, 32, 3) bytes of a PNG that is 1024 wide: a row holds the pixels of one image."""
    try:
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        if image.width != 1024 or image.height > 100_000:
            raise UserError(f"'{where}' is {image.width}x{image.height}: a batch is 1024 wide, a row an image.")
        pixels = np.asarray(image.convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None
    return pixels.reshape(-1, 32, 32, 3)
