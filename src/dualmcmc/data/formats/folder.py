"""A folder of image files, or a single one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dualmcmc.data.images import UnreadableImage
from dualmcmc.data.source import FileSource, ImageSource
from dualmcmc.utils.errors import UserError

SUFFIXES = {
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".webp", ".avif"),
    *(".bmp", ".gif", ".tga", ".tif", ".tiff", ".ppm", ".pgm"),
}
MAX_BYTES = 1 << 28  # of one encoded image
Keep = Callable[[str], bool]  # selects images by name


class NoImages(UserError):
    """A folder or archive without images."""


def is_image(name: str) -> bool:
    """Whether a file name has an image's suffix; the files ._* that macOS writes are not images."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith("._")


def walk(top: Path) -> Iterator[Path]:
    """All files under a folder. Links are followed; each folder is visited once."""
    seen: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder '{error.filename}': {error.strerror}.")

    for folder, subfolders, names in os.walk(top, followlinks=True, onerror=refuse):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (Path(folder) / name for name in names)


def open_folder(path: Path, keep: Keep | None = None) -> ImageSource:
    """The images under a folder, sorted by name."""
    files = sorted(file for file in walk(path) if file.is_file() or (file.is_symlink() and not file.exists()))
    images = [file for file in files if is_image(file.name) and (keep is None or keep(str(file.relative_to(path))))]
    if not images:
        raise no_images(path)
    return FileSource(str(path), lambda: ((str(file), partial(_read, file)) for file in images), len(images))


def open_file(path: Path) -> ImageSource:
    """A single image."""
    return FileSource(str(path), lambda: iter([(str(path), partial(_read, path))]), 1)


def no_images(path: Path) -> NoImages:
    """The error for a folder or archive without images."""
    return NoImages(f"'{path}' contains no images ({', '.join(sorted(SUFFIXES))}).")


def check_size(size: int) -> None:
    """Raise `UnreadableImage` if an encoded image of `size` bytes is too large."""
    if size > MAX_BYTES:
        raise UnreadableImage(f"{size:,} bytes are too many for an image")


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        check_size(os.fstat(file.fileno()).st_size)
        return file.read()
