"""A user's own images: a folder, zip, tar, LMDB, parquet or npz, or one file, as a stream of images.

Names inside an archive are labels and nothing more: no archive is ever unpacked to disk.
"""

from __future__ import annotations

import io
import math
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from dualmcmc.data.archives import open_zip, tar_content, tar_members, zip_content
from dualmcmc.data.images import BadImage
from dualmcmc.data.machine import available_memory, in_words
from dualmcmc.data.source import Arrays, Files, Held, Source
from dualmcmc.errors import UserError, first_line, nearest
from dualmcmc.words import plain

ENDINGS = {
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".webp", ".avif"),
    *(".bmp", ".gif", ".tga", ".tif", ".tiff", ".ppm", ".pgm"),
}
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MOST_BYTES = 1 << 28  # of one encoded image
KINDS = "a folder, zip, tar, LMDB, parquet, npz, packed file or image"


class NoImages(UserError):
    """A place without a single image."""


Listing = Iterator[tuple[str, Callable[[], bytes]]]
Keep = Callable[[str], bool]


def open_source(path: Path, keep: Keep | None = None) -> Source:
    """The images at `path`, in the order of their names (tar, LMDB, parquet, npz: as stored).

    `keep` chooses by an image's name: its path inside the folder or archive.
    """
    path, array = npz_array(path)
    if not path.exists():
        raise UserError(f"there is nothing at '{path}': give {KINDS}.")
    if path.is_dir():
        if (path / "data.mdb").is_file():
            return _lmdb(path, keep)
        return _folder(path, keep)
    if not path.is_file():
        raise UserError(f"'{path}' is not {KINDS}.")
    ending = path.suffix.lower()
    if ending == ".npz":
        return Arrays(f"{path}:{array}" if array else str(path), lambda: _npz(path, array))
    if ending in (".mdb", ".lmdb"):
        return _lmdb(path, keep)
    if ending == ".parquet":
        return _parquet(path, [path], keep)
    if path.name.lower().endswith(TARS):
        return Files(str(path), lambda: _tar(path, keep), None)
    if ending == ".zip" or zipfile.is_zipfile(path):
        return _zip(path, keep)
    if ending in ENDINGS:
        return Files(str(path), lambda: iter([(str(path), partial(_file, path))]), 1)
    raise UserError(f"'{path}' is not {KINDS}.")


def is_image(name: str) -> bool:
    """By its ending; the shadows that macOS writes beside files (._a.png) are none."""
    path = Path(name)
    return path.suffix.lower() in ENDINGS and not path.name.startswith("._")


def walk(top: Path) -> Iterator[Path]:
    """Every file under a folder, through links too; a folder that links lead to twice is read once."""
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


def _folder(path: Path, keep: Keep | None) -> Source:
    files = sorted(file for file in walk(path) if file.is_file() or (file.is_symlink() and not file.exists()))
    images = [file for file in files if is_image(file.name) and (keep is None or keep(str(file.relative_to(path))))]
    shards = [file for file in files if file.suffix.lower() == ".parquet"]
    if not images and shards:
        return _parquet(path, shards, keep)
    if not images:
        raise NoImages(f"'{path}' holds no images ({', '.join(sorted(ENDINGS))}).")
    return Files(str(path), lambda: ((str(file), partial(_file, file)) for file in images), len(images))


def _zip(path: Path, keep: Keep | None) -> Source:
    def wanted(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        entries = (entry for entry in archive.infolist() if is_image(entry.filename) and not entry.is_dir())
        return sorted((e for e in entries if keep is None or keep(e.filename)), key=lambda entry: entry.filename)

    def listing() -> Listing:
        with open_zip(path) as archive:
            for entry in wanted(archive):
                read = partial(zip_content, archive, entry)
                yield f"{path}:{plain(entry.filename, 300)}", _content(read, entry.file_size)

    try:
        with open_zip(path) as archive:
            count = len(wanted(archive))
    except UserError:
        raise
    except Exception as error:  # a damaged directory can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if count == 0:
        raise NoImages(f"'{path}' holds no images ({', '.join(sorted(ENDINGS))}).")
    return Files(str(path), listing, count)


def _content(read: Callable[[], bytes], size: int) -> Callable[[], bytes]:
    """What `read` gives now, to be handed over later: archives are read by one thread."""
    if size > MOST_BYTES:
        return partial(_fail, f"{size:,} bytes are too many for an image")
    try:
        return Held(read())
    except tarfile.TarError:
        raise  # what follows in a tar cannot be found any more
    except Exception as error:  # a damaged member can fail in many ways
        return partial(_fail, first_line(error))


def _fail(problem: str) -> bytes:
    raise BadImage(problem)


def _file(path: Path) -> bytes:
    """A file's content, if it can be an image's."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return file.read() if size <= MOST_BYTES else _fail(f"{size:,} bytes are too many for an image")


def _tar(path: Path, keep: Keep | None) -> Listing:
    try:
        for archive, member in tar_members(path):
            if is_image(member.name) and (keep is None or keep(member.name)):
                read = partial(tar_content, archive, member)
                yield f"{path}:{plain(member.name, 300)}", _content(read, member.size)
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None


def _needs(package: str, what: str) -> UserError:
    return UserError(f"reading {what} needs the package {package}: pip install 'dualmcmc[data]'.")


def _lmdb(path: Path, keep: Keep | None) -> Source:
    """LSUN's layout: every value is an encoded image, in the order of the keys."""
    try:
        import lmdb
    except ImportError:
        raise _needs("lmdb", "an LMDB") from None

    def open_it() -> Any:
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False, create=False)

    def listing() -> Listing:
        try:
            with open_it() as environment, environment.begin(buffers=False) as transaction:
                for key, value in transaction.cursor():
                    name = key.decode(errors="replace")
                    if keep is None or keep(name):
                        yield f"{path}:{plain(name, 300)}", Held(value)
        except lmdb.Error as error:
            raise UserError(f"cannot read the LMDB '{path}': {first_line(error)}.") from None

    try:
        with open_it() as environment:
            count = environment.stat()["entries"]
    except lmdb.Error as error:
        raise UserError(f"cannot read the LMDB '{path}': {first_line(error)}.") from None
    if count == 0:
        raise NoImages(f"'{path}' holds no images.")
    return Files(str(path), listing, count if keep is None else None)


def _parquet(path: Path, shards: list[Path], keep: Keep | None) -> Source:
    """A column of encoded images: binary, or a struct with a field `bytes`."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _needs("pyarrow", "parquet") from None

    def column(file: Any, shard: Path) -> tuple[str, bool]:
        found = []
        for field in file.schema_arrow:
            kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
            nested = pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            inner = kind.field("bytes").type if nested else kind
            if pyarrow.types.is_binary(inner) or pyarrow.types.is_large_binary(inner):
                found.append((field.name, nested))
        if not found:
            names = plain(", ".join(file.schema_arrow.names), 300)
            raise UserError(f"'{shard}' has no column of images (encoded bytes), only: {names}.")
        return sorted(found, key=lambda item: item[0] not in ("image", "img"))[0]

    def listing() -> Listing:
        for shard in shards:
            try:
                with parquet.ParquetFile(shard) as file:
                    name, nested = column(file, shard)
                    row = 0
                    for batch in file.iter_batches(batch_size=64, columns=[name]):
                        for value in batch.column(0).to_pylist():
                            content = value.get("bytes") if nested and value else value
                            label = f"{shard}:{row}"
                            row += 1
                            if keep is None or keep(label):
                                yield label, Held(content or b"")
            except UserError:
                raise
            except Exception as error:  # a damaged file can fail in many ways
                raise UserError(f"cannot read '{shard}': {first_line(error)}.") from None

    try:
        count = sum(parquet.read_metadata(shard).num_rows for shard in shards)
    except Exception as error:
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if count == 0:
        raise NoImages(f"'{path}' holds no images.")
    return Files(str(path), listing, count if keep is None else None)


def _which_array(path: Path, shapes: Mapping[str, Sequence[int]], wanted: str | None) -> str:
    names = list(shapes)
    if wanted is not None:
        if wanted not in names:
            known = plain(", ".join(names), 300)
            raise UserError(f"'{path}' has no array '{wanted}', only {known}.{nearest(wanted, names)}")
        return wanted
    for usual in ("images", "x", "arr_0"):
        if usual in names:
            return usual
    shaped = [name for name, shape in shapes.items() if len(shape) in (3, 4)]
    if len(shaped) > 1:
        known = plain(", ".join(shaped), 300)
        raise UserError(
            f"'{path}' holds several arrays of images ({known}): say which, as in '{path}:{plain(shaped[0])}'."
        )
    return (shaped or names)[0]


def _shape(members: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[int, ...]:
    """Of a stored array, from its header; the type is looked at when it is chosen."""
    with members.open(entry) as file:
        return _npy_header(file)[0]


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    read = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(file) != (1, 0):
        read = np.lib.format.read_array_header_2_0
    return read(file)


def npz_array(path: Path) -> tuple[Path, str | None]:
    """A file, and which of its arrays is meant: FILE.npz:ARRAY."""
    file, colon, array = str(path).rpartition(".npz:")
    return (Path(file + ".npz"), array) if colon and array and not path.exists() else (path, None)


def _npz(path: Path, wanted: str | None = None) -> np.ndarray:
    """(N, H, W, C) bytes: the array that is wanted; else images, x or arr_0; else the only one shaped like images."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"'{path}' is not an npz file.")
    try:
        with open_zip(path) as members:
            entries = {e.filename.removesuffix(".npy"): e for e in members.infolist() if e.filename.endswith(".npy")}
            if not entries:
                raise UserError(f"'{path}' holds no array.")
            name = _which_array(path, {name: _shape(members, entry) for name, entry in entries.items()}, wanted)
            size = entries[name].file_size
            if size > available_memory() // 2:
                raise UserError(f"'{path}' unpacks to {in_words(size)}, more than fits into memory: use a packed file.")
            array = _npy(zip_content(members, entries[name]), f"'{path}': the array '{plain(name)}'")
    except UserError:
        raise
    except Exception as error:  # a damaged file can fail in many ways
        raise UserError(f"cannot read '{path}': {first_line(error)}.") from None
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and array.shape[-1] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[-1] not in (1, 3) or 0 in array.shape:
        raise UserError(f"'{path}': the array '{plain(name)}' has shape {array.shape}, needed is N x H x W x 1 or 3.")
    return array


def _npy(content: bytes, what: str) -> np.ndarray:
    """A stored array of bytes. NumPy would make room for what the header claims, and unpickle where it is told to."""
    file = io.BytesIO(content)
    shape, fortran, dtype = _npy_header(file)
    if dtype.hasobject:
        raise ValueError("its array is of pickled objects")
    if dtype != np.uint8:
        raise UserError(f"{what} is {plain(str(dtype))}, images must be uint8 (0..255).")
    pixels = np.frombuffer(content, np.uint8, offset=file.tell())
    if len(pixels) != math.prod(shape):
        raise ValueError(f"its array of {len(pixels):,} bytes does not fit the shape it claims")
    return pixels.reshape(shape, order="F" if fortran else "C")
