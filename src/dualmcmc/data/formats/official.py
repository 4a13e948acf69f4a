"""The official files of a dataset, found by name in a folder, tar, zip or Debian package."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from dualmcmc.data.formats.archives import TAR_SUFFIXES, open_zip, read_tar_member, read_zip_member, tar_members
from dualmcmc.data.formats.folder import walk
from dualmcmc.data.source import ArraySource, ImageSource
from dualmcmc.utils.device import available_memory, format_bytes
from dualmcmc.utils.errors import UserError, first_line

MAX_BYTES = 4 << 30  # of one file
MAX_GUNZIPPED = 1 << 28  # bytes of an unpacked .gz: MNIST's, the largest, has 47 MB

NamedFile = tuple[str, Callable[[], bytes]]  # a file's name, and a function that reads it


class OfficialFiles:
    """Files anywhere inside `path` (also inside the archives of a folder), by name without the path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        """The names of all files."""
        return {name for name, _ in self._files()}

    def read(self, *wanted: str) -> dict[str, bytes]:
        """The contents of files, in one pass; NAME also finds NAME.gz and unpacks it."""
        found: dict[str, bytes] = {}
        for name, read in self._files():
            plain = name.removesuffix(".gz")
            if plain in wanted and plain not in found:
                content = _read(read, f"{self.path}:{name}")
                found[plain] = _gunzip(content, f"{self.path}:{name}") if name != plain else content
            if len(found) == len(wanted):
                break
        return found

    def _files(self) -> Iterator[NamedFile]:
        if self.path.is_dir():
            files = sorted(file for file in walk(self.path) if file.is_file())
            for file in files:
                yield file.name, file.read_bytes
            for file in files:
                if _is_archive(file):
                    yield from _archive_files(file)
        elif _is_archive(self.path):
            yield from _archive_files(self.path)
        elif self.path.is_file():
            yield self.path.name, self.path.read_bytes


def one_file_per_split(
    path: Path, files: Mapping[str, str], parse: Callable[[bytes, str], np.ndarray]
) -> dict[str, ImageSource]:
    """The splits of a dataset with one file per split, as far as they exist."""
    official = OfficialFiles(path)
    names = {name.removesuffix(".gz") for name in official.names()}
    found = {split: file for split, file in files.items() if file in names}

    def load(file: str) -> np.ndarray:
        return parse(official.read(file)[file], f"{path}: {file}")

    return {split: ArraySource(f"{path}: {file}", partial(load, file)) for split, file in found.items()}


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith((*TAR_SUFFIXES, ".zip", ".deb"))


def _archive_files(path: Path) -> Iterator[NamedFile]:
    """The files in an archive, except those that are too large."""
    name, max_bytes = path.name.lower(), min(MAX_BYTES, available_memory() // 4)
    try:
        if name.endswith(".zip"):
            with open_zip(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and entry.file_size <= max_bytes:
                        yield Path(entry.filename).name, partial(read_zip_member, archive, entry)
        elif name.endswith(".deb"):
            with subprocess.Popen(  # an absolute path: a name that begins with - would be an option
                ["dpkg-deb", "--fsys-tarfile", str(path.resolve())], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                yield from _tar_files(process.stdout, max_bytes)
        else:
            yield from _tar_files(path, max_bytes)
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None


def _tar_files(source: Path | IO[bytes], max_bytes: int) -> Iterator[NamedFile]:
    for archive, member in tar_members(source):
        if member.size <= max_bytes:
            yield Path(member.name).name, partial(read_tar_member, archive, member)


def _read(read: Callable[[], bytes], where: str) -> bytes:
    try:
        return read()
    except Exception as error:  # a damaged member can fail in many ways
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None


def _gunzip(content: bytes, where: str) -> bytes:
    try:
        decompressor = zlib.decompressobj(31)
        unpacked = decompressor.decompress(content, MAX_GUNZIPPED)
    except zlib.error as error:
        raise UserError(f"cannot read '{where}': {error}.") from None
    if not decompressor.eof:
        raise UserError(f"cannot read '{where}': truncated, or larger than {format_bytes(MAX_GUNZIPPED)} unpacked.")
    return unpacked
