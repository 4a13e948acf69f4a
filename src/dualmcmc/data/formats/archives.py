"""Zip and tar archives from untrusted sources: read member by member, in bounded memory, never extracted to disk."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from dualmcmc.data.formats.folder import Keep, check_size, is_image, no_images
from dualmcmc.data.images import UnreadableImage
from dualmcmc.data.source import EncodedImage, FileSource, ImageSource, InMemory
from dualmcmc.utils.errors import UserError, first_line, sanitize

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_TAR_HEADER = 1 << 16  # bytes of a long name or extended header, which tarfile reads at once
MAX_PAX_HEADERS = 1000  # global entries of a tar
ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_EXTENDED_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class _TarInfo(tarfile.TarInfo):
    """Refuses what a hostile file could abuse; `_proc_member` is tarfile's hook for subclasses."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("it contains a sparse file")
        if self.type in _EXTENDED_HEADERS and self.size > MAX_TAR_HEADER:
            raise tarfile.ReadError("it contains a header that is too long")
        if len(archive.pax_headers) > MAX_PAX_HEADERS:
            raise tarfile.ReadError("it contains too many global headers")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("it contains a sparse file")


def tar_members(source: Path | IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The regular files of a tar, in order; each must be read before the next. Links and devices are skipped."""
    options: dict[str, Any] = (
        {"name": source, "mode": "r|*"} if isinstance(source, Path) else {"fileobj": source, "mode": "r|"}
    )
    with tarfile.open(**options, tarinfo=_TarInfo) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # grows with every member, of which there may be billions
            if member.isfile():
                yield archive, member


def read_tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """The content of a member."""
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip; refuse overlapping members, with which a small file could unpack to terabytes."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.compress_size for entry in archive.infolist()) > os.path.getsize(path):
            raise zipfile.BadZipFile("its members overlap")
        yield archive


def read_zip_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The content of a member, at most as long as the archive claims."""
    if entry.compress_type not in ZIP_METHODS:  # other methods unpack everything before the size is checked
        raise zipfile.BadZipFile("unsupported compression: use deflate")
    return archive.read(entry)


def open_zip_images(path: Path, keep: Keep | None = None) -> ImageSource:
    """The images in a zip, sorted by name."""

    def members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        entries = (entry for entry in archive.infolist() if is_image(entry.filename) and not entry.is_dir())
        return sorted((e for e in entries if keep is None or keep(e.filename)), key=lambda entry: entry.filename)

    def listing() -> Iterator[EncodedImage]:
        with open_zip(path) as archive:
            for entry in members(archive):
                read = partial(read_zip_member, archive, entry)
                yield f"{path}:{sanitize(entry.filename, 300)}", _read_ahead(read, entry.file_size)

    try:
        with open_zip(path) as archive:
            count = len(members(archive))
    except UserError:
        raise
    except Exception as error:  # a damaged directory can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if count == 0:
        raise no_images(path)
    return FileSource(str(path), listing, count)


def open_tar_images(path: Path, keep: Keep | None = None) -> ImageSource:
    """The images in a tar, as stored."""

    def listing() -> Iterator[EncodedImage]:
        try:
            for archive, member in tar_members(path):
                if is_image(member.name) and (keep is None or keep(member.name)):
                    read = partial(read_tar_member, archive, member)
                    yield f"{path}:{sanitize(member.name, 300)}", _read_ahead(read, member.size)
        except UserError:
            raise
        except Exception as error:  # a damaged archive can fail in many ways
            raise UserError(f"cannot read '{path}': {first_line(error)}.") from None

    return FileSource(str(path), listing, None)


def _read_ahead(read: Callable[[], bytes], size: int) -> Callable[[], bytes]:
    """Read a member now, for a thread that decodes it later: only one thread can read an archive."""
    try:
        check_size(size)
        return InMemory(read())
    except tarfile.TarError:
        raise  # the next member cannot be found
    except Exception as error:  # a damaged member can fail in many ways
        return partial(_fail, first_line(error))


def _fail(problem: str) -> bytes:
    raise UnreadableImage(problem)
