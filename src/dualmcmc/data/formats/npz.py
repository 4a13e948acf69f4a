"""NumPy archives: npz files with one uint8 array of images."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from dualmcmc.data.formats.archives import open_zip, read_zip_member
from dualmcmc.utils.device import available_memory, format_bytes
from dualmcmc.utils.errors import UserError, first_line, nearest, sanitize

USUAL_NAMES = ("images", "x", "arr_0")
MAX_HEADER = 10_000  # bytes, NumPy's own limit, which applies only after reading


def npz_array(path: Path) -> tuple[Path, str | None]:
    """Split FILE.npz:ARRAY into a file and the name of an array."""
    file, colon, array = str(path).rpartition(".npz:")
    return (Path(file + ".npz"), array) if colon and array and not path.exists() else (path, None)


def load_npz(path: Path, wanted: str | None = None) -> np.ndarray:
    """(N, H, W, C) uint8: the array `wanted`, or images, x, arr_0, or the only one with the shape of images."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"'{path}' is not an npz file.")
    try:
        with open_zip(path) as archive:
            entries = {e.filename.removesuffix(".npy"): e for e in archive.infolist() if e.filename.endswith(".npy")}
            if not entries:
                raise UserError(f"'{path}' contains no array.")
            name = _select_array(path, {name: _read_shape(archive, entry) for name, entry in entries.items()}, wanted)
            what = f"'{path}': the array '{sanitize(name)}'"
            size = entries[name].file_size
            if size > available_memory() // 2:
                raise UserError(f"{what} has {format_bytes(size)}, too much for the free memory: use a packed file.")
            array = _parse_npy(read_zip_member(archive, entries[name]), what)
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and array.shape[-1] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[-1] not in (1, 3) or 0 in array.shape:
        raise UserError(f"{what} has shape {array.shape}: expected N x H x W x C with 1 or 3 channels.")
    return array


def _select_array(path: Path, shapes: Mapping[str, Sequence[int]], wanted: str | None) -> str:
    names = list(shapes)
    if wanted is not None:
        if wanted not in names:
            known = sanitize(", ".join(names), 300)
            raise UserError(f"'{path}' has no array '{wanted}', only {known}.{nearest(wanted, names)}")
        return wanted
    for usual in USUAL_NAMES:
        if usual in names:
            return usual
    candidates = [name for name, shape in shapes.items() if len(shape) in (3, 4)]
    if len(candidates) > 1:
        known = sanitize(", ".join(candidates), 300)
        raise UserError(
            f"'{path}' contains several arrays of images ({known}): name one, as in '{path}:{sanitize(candidates[0])}'."
        )
    return (candidates or names)[0]


def _read_shape(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[int, ...]:
    with archive.open(entry) as file:
        return _read_header(file)[0]


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type of a stored array."""
    first = np.lib.format.read_magic(file) == (1, 0)
    length = file.read(2 if first else 4)
    if int.from_bytes(length, "little") > MAX_HEADER:
        raise ValueError("its header is too long")
    header = io.BytesIO(length + file.read(int.from_bytes(length, "little")))
    return (np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0)(header)


def _parse_npy(content: bytes, what: str) -> np.ndarray:
    """A stored uint8 array. NumPy's reader would allocate what the header claims, and could unpickle objects."""
    file = io.BytesIO(content)
    shape, fortran, dtype = _read_header(file)
    if dtype.hasobject:
        raise ValueError("its array contains pickled objects")
    if dtype != np.uint8:
        raise UserError(f"{what} is {sanitize(str(dtype))}: expected uint8 (0..255).")
    pixels = np.frombuffer(content, np.uint8, offset=file.tell())
    if len(pixels) != math.prod(shape):
        raise ValueError(f"its array of {len(pixels):,} bytes does not match the shape it claims")
    return pixels.reshape(shape, order="F" if fortran else "C")
