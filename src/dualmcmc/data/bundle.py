"""Official files by their names, whether in a folder, a tar, a zip or a Debian package."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from dualmcmc.data.archives import open_zip, tar_content, tar_members, zip_content
from dualmcmc.data.containers import TARS, walk
from dualmcmc.data.machine import available_memory, in_words
from dualmcmc.data.source import Arrays, Source
from dualmcmc.errors import UserError, first_line

MOST_BYTES = 4 << 30  # of one file of a set
MOST_UNPACKED = 1 << 28  # of a file that ends in .gz: the largest there is, MNIST's, has 47 MB


class Bundle:
    """Files of a set, found by their last name wherever they lie inside `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> set[str]:
        """Last names of all files. Those inside archives that lie in a folder count too."""
        return {name for name, _ in self._entries()}

    def read(self, *wanted: str) -> dict[str, bytes]:
        """The content of files by last name, in one pass; `NAME.gz` is unpacked and counts as NAME."""
        found: dict[str, bytes] = {}
        for name, content in self._entries():
            plain = name.removesuffix(".gz")
            if plain in wanted and plain not in found:
                data = _content(content, f"{self.path}:{name}")
                found[plain] = _gunzip(data, f"{self.path}:{name}") if name != plain else data
            if len(found) == len(wanted):
                break
        return found

    def _entries(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        if self.path.is_dir():
            files = sorted(file for file in walk(self.path) if file.is_file())
            archives = [file for file in files if _is_archive(file)]
            for file in files:
                yield file.name, file.read_bytes
            for archive in archives:
                yield from _inside(archive)
        elif _is_archive(self.path):
            yield from _inside(self.path)
        elif self.path.is_file():
            yield self.path.name, self.path.read_bytes


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith((*TARS, ".zip", ".deb"))


def _inside(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    name, most = path.name.lower(), _most()
    try:
        if name.endswith(".zip"):
            with open_zip(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and entry.file_size <= most:
                        yield Path(entry.filename).name, partial(zip_content, archive, entry)
        elif name.endswith(".deb"):
            with subprocess.Popen(  # a whole path: a name that begins with - would be an option
                ["dpkg-deb", "--fsys-tarfile", str(path.resolve())], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                yield from _members(process.stdout, most)
        else:
            yield from _members(path, most)
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None


def _most() -> int:
    """Bytes that one file may unpack to."""
    return min(MOST_BYTES, available_memory() // 4)


def _content(read: Callable[[], bytes], where: str) -> bytes:
    try:
        return read()
    except Exception as error:
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None


def _members(source: Path | IO[bytes], most: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for archive, member in tar_members(source):
        if member.size <= most:
            yield Path(member.name).name, partial(tar_content, archive, member)


def _gunzip(data: bytes, where: str) -> bytes:
    try:
        unpacked = zlib.decompressobj(31)
        content = unpacked.decompress(data, MOST_UNPACKED)
    except zlib.error as error:
        raise UserError(f"cannot read '{where}': {error}.") from None
    if not unpacked.eof:
        raise UserError(f"cannot read '{where}': it is cut short, or longer than {in_words(MOST_UNPACKED)} unpacked.")
    return content


def file_a_split(path: Path, files: Mapping[str, str], parse: Callable[[bytes, str], np.ndarray]) -> dict[str, Source]:
    """The splits of a set that has one file for each, those that are there."""
    bundle = Bundle(path)
    present = {name.removesuffix(".gz") for name in bundle.names()}

    def load(file: str) -> np.ndarray:
        return parse(bundle.read(file)[file], f"{path}: {file}")

    return {split: Arrays(f"{path}: {file}", partial(load, file)) for split, file in files.items() if file in present}
