"""Zip and tar files from strangers: members come one by one, in bounded memory, and nothing is written to disk.

Python's own modules do the reading. What they would believe a hostile file is refused here first.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MOST_HEADER = 1 << 16  # bytes of a tar's long name or extended header, which are read as a whole
MOST_FACTS = 1000  # that a tar may note for all its members
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class _Member(tarfile.TarInfo):
    """A member whose header is of a sane size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        # The place that the module leaves open for members of one's own.
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("it holds a sparse file")
        if self.type in _HEADERS and self.size > MOST_HEADER:
            raise tarfile.ReadError("it holds a header that is too long")
        if len(archive.pax_headers) > MOST_FACTS:
            raise tarfile.ReadError("it notes too much for all its members")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("it holds a sparse file")


_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


def tar_members(source: Path | IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The plain files of a tar, as they come; each must be read before the next. Links and devices are passed over."""
    whence: dict[str, Any] = (
        {"name": source, "mode": "r|*"} if isinstance(source, Path) else {"fileobj": source, "mode": "r|"}
    )
    with tarfile.open(**whence, tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # a note of each, and there may be billions
            if member.isfile():
                yield archive, member


def tar_content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """What a member holds."""
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip whose members do not share their bytes: with those a small file could hold terabytes."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.compress_size for entry in archive.infolist()) > os.path.getsize(path):
            raise zipfile.BadZipFile("its members overlap")
        yield archive


def zip_content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """What a member holds, no more of it than the archive says it is."""
    if entry.compress_type not in METHODS:  # others are unpacked whole before anything is counted
        raise zipfile.BadZipFile("it is compressed in an unusual way: use deflate")
    return archive.read(entry)
