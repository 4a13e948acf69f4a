"""SVHN's cropped digits: MATLAB files with an array X (32, 32, 3, N)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from dualmcmc.data.formats.official import one_file_per_split
from dualmcmc.data.source import ImageSource
from dualmcmc.utils.errors import UserError, first_line
from dualmcmc.utils.extras import require

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat", "extra": "extra_32x32.mat"}


def read(path: Path) -> dict[str, ImageSource]:
    """The splits whose files exist."""
    return one_file_per_split(path, FILES, parse_mat)


def parse_mat(content: bytes, where: str) -> np.ndarray:
    """(N, 32, 32, 3) uint8."""
    scipy_io = require("scipy.io", "data", "reading SVHN's MATLAB files")
    try:
        pixels = scipy_io.loadmat(io.BytesIO(content), variable_names=["X"]).get("X")
    except Exception as error:  # SciPy's reader fails in many ways on damaged files
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[:3] != (32, 32, 3):
        raise UserError(f"'{where}' is not SVHN's cropped digits: it has no 32 x 32 x 3 x N uint8 array 'X'.")
    return np.ascontiguousarray(pixels.reshape(32, 32, 3, -1).transpose(3, 0, 1, 2))
