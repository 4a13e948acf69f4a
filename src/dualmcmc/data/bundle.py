"""Official files by their names, whether in a folder, a tar, a zip or a Debian package."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from dualmcmc.data.containers import TARS, walk
from dualmcmc.data.source import Arrays, Source
from dualmcmc.errors import UserError, first_line

MOST_BYTES = 4 << 30  # of one file of a set
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, OSError)


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
    name = path.name.lower()
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and entry.file_size <= MOST_BYTES:
                        yield Path(entry.filename).name, partial(archive.read, entry)
        elif name.endswith(".deb"):
            with subprocess.Popen(
                ["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdout is not None
                with tarfile.open(fileobj=process.stdout, mode="r|") as stream:
                    yield from _members(stream)
        else:
            with tarfile.open(path, "r|*") as stream:
                yield from _members(stream)
    except DAMAGE as error:
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None


def _content(read: Callable[[], bytes], where: str) -> bytes:
    try:
        return read()
    except DAMAGE as error:
        raise UserError(f"cannot read '{where}': {first_line(error)}.") from None


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, Callable[[], bytes]]]:
    def content(member: tarfile.TarInfo) -> bytes:
        file: IO[bytes] | None = archive.extractfile(member)
        return file.read() if file is not None else b""

    for member in archive:
        if member.isfile() and member.size <= MOST_BYTES:
            yield Path(member.name).name, partial(content, member)


def _gunzip(data: bytes, where: str) -> bytes:
    try:
        unpacked = zlib.decompressobj(31)
        content = unpacked.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise UserError(f"cannot read '{where}': {error}.") from None
    if not unpacked.eof:
        raise UserError(f"cannot read '{where}': it is cut short.")
    return content


def file_a_split(path: Path, files: Mapping[str, str], parse: Callable[[bytes, str], np.ndarray]) -> dict[str, Source]:
    """The splits of a set that has one file for each, those that are there."""
    bundle = Bundle(path)
    present = {name.removesuffix(".gz") for name in bundle.names()}

    def load(file: str) -> np.ndarray:
        return parse(bundle.read(file)[file], f"{path}: {file}")

    return {split: Arrays(f"{path}: {file}", partial(load, file)) for split, file in files.items() if file in present}
