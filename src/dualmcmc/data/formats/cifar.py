"""CIFAR-10 and CIFAR-100 in the authors' pickle format; CIFAR-10 also as PNG files with one image per row."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from dualmcmc.data import safe_pickle
from dualmcmc.data.formats.official import OfficialFiles
from dualmcmc.data.source import ArraySource, ImageSource
from dualmcmc.utils.errors import UserError, first_line

CIFAR10_FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR100_FILES = {"train": ("train",), "test": ("test",)}
MAX_PNG_ROWS = 100_000


def read_cifar10(path: Path) -> dict[str, ImageSource]:
    """cifar-10-batches-py/, its tar.gz, or PNG batches, anywhere in `path`."""
    return _read(path, CIFAR10_FILES)


def read_cifar100(path: Path) -> dict[str, ImageSource]:
    """cifar-100-python/ or its tar.gz, anywhere in `path`."""
    return _read(path, CIFAR100_FILES)


def _read(path: Path, splits: Mapping[str, tuple[str, ...]]) -> dict[str, ImageSource]:
    official = OfficialFiles(path)
    names = official.names()

    def load(files: tuple[str, ...], suffix: str) -> np.ndarray:
        contents = official.read(*(file + suffix for file in files))
        parse = _parse_png if suffix else _parse_pickle
        return np.concatenate([parse(contents[file + suffix], f"{path}: {file}{suffix}") for file in files])

    sources: dict[str, ImageSource] = {}
    for split, files in splits.items():
        for suffix in ("", ".png"):
            missing = [file + suffix for file in files if file + suffix not in names]
            if 0 < len(missing) < len(files):
                raise UserError(f"'{path}': the {split} split is incomplete, {', '.join(missing)} missing.")
            if not missing and split not in sources:
                sources[split] = ArraySource(f"{path}: {split}", partial(load, files, suffix))
    return sources


def _parse_pickle(content: bytes, where: str) -> np.ndarray:
    """(N, 32, 32, 3) uint8. `data` has one image per row, as three planes."""
    batch = safe_pickle.read(content, where)
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UserError(f"'{where}' is not a CIFAR batch: it has no N x 3072 uint8 array 'data'.")
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _parse_png(content: bytes, where: str) -> np.ndarray:
    """(N, 32, 32, 3) uint8 from a PNG of width 1024: each row contains the pixels of one image."""
    try:
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        if image.width != 1024 or image.height > MAX_PNG_ROWS:
            raise UserError(
                f"'{where}' has {image.width}x{image.height} pixels: a batch is 1024 wide, with one image per row."
            )
        pixels = np.asarray(image.convert("RGB"))
    except UserError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None
    return pixels.reshape(-1, 32, 32, 3)
