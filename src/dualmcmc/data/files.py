"""A user's own images: a folder, a zip or an npz, brought to one size and colour mode."""

from __future__ import annotations

import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dualmcmc.errors import UserError

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def read_images(path: Path, size: int, channels: int) -> Tensor:
    """(N, C, size, size) bytes, in the order of the files' names.

    Another size is cropped to its central square and resized; another mode is converted. A file that
    cannot be read is refused by name.
    """
    if not path.exists():
        raise UserError(f"there is nothing at '{path}': give data.path a folder, .zip or .npz of images.")
    if not (path.is_dir() or path.is_file()):
        raise UserError(f"'{path}' is not a folder, .zip, .npz or image.")
    if path.suffix.lower() == ".npz" and path.is_file():
        return _resize(_npz(path, channels), size)
    if path.is_dir():
        named: Iterator[tuple[str, IO[bytes]]] = _folder(path)
    elif zipfile.is_zipfile(path):
        named = _zip(path)
    elif path.suffix.lower() in ENDINGS:
        named = _one(path)
    else:
        raise UserError(f"'{path}' is not a folder, .zip, .npz or image.")
    images = [_decode(name, file, size, channels) for name, file in named]
    if not images:
        raise UserError(f"'{path}' holds no images ({', '.join(sorted(ENDINGS))}).")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()


def _folder(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for item in sorted(path.rglob("*")):
        if _is_image(item.name) and item.is_file():
            yield from _one(item)


def _is_image(name: str) -> bool:
    """By its ending; the shadows that macOS writes beside files (._a.png) are none."""
    path = Path(name)
    return path.suffix.lower() in ENDINGS and not path.name.startswith("._")


def _one(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    try:
        with open(path, "rb") as file:
            yield str(path), file
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}.") from None


def _zip(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    where = str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                where = f"{path}:{name}"
                if _is_image(name):
                    yield where, io.BytesIO(archive.read(name))
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, OSError) as error:
        raise UserError(f"cannot read '{where}': {error}.") from None


def _decode(name: str, file: IO[bytes], size: int, channels: int) -> np.ndarray:
    """(size, size, channels) bytes of one image file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(file)
            if image.mode.startswith("I"):  # 16-bit grey, which convert() would cut off at 255
                image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
            image = image.convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError:
        raise UserError(f"cannot read the image '{name}': it is in no known image format.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"cannot read the image '{name}': {str(error).splitlines()[0]}.") from None
    return np.asarray(_to_square(image, size)).reshape(size, size, channels)


def _to_square(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    side = min(width, height)
    if side != max(width, height):
        left, top = (width - side) // 2, (height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return image if side == size else image.resize((size, size), Image.Resampling.LANCZOS)


def _npz(path: Path, channels: int) -> np.ndarray:
    """(N, H, W, channels) bytes: the array called images, x or arr_0, or the only one."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"'{path}' is not an npz file.")
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = [name for name in ("images", "x", "arr_0") if name in archive.files] or archive.files
            if not names:
                raise UserError(f"'{path}' holds no array.")
            array = archive[names[0]]
    except (OSError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"cannot read '{path}': {str(error).splitlines()[0]}.") from None
    if array.dtype != np.uint8:
        raise UserError(f"'{path}': the array '{names[0]}' is {array.dtype}, images must be uint8 (0..255).")
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and array.shape[-1] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[-1] != channels or 0 in array.shape:
        raise UserError(
            f"'{path}': the array '{names[0]}' has shape {array.shape}, needed is N x H x W x {channels} "
            f"(data.channels={channels})."
        )
    return array


def _resize(array: np.ndarray, size: int) -> Tensor:
    if array.shape[1:3] != (size, size):
        images = [_to_square(Image.fromarray(item[..., 0] if item.shape[-1] == 1 else item), size) for item in array]
        array = np.stack([np.asarray(image).reshape(size, size, -1) for image in images])
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
