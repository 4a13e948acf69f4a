"""Readers of image files, one module per format. `open_source` selects one by file name."""

from __future__ import annotations

import zipfile
from pathlib import Path

from dualmcmc.data.formats.archives import TAR_SUFFIXES, open_tar_images, open_zip_images
from dualmcmc.data.formats.folder import SUFFIXES, Keep, NoImages, open_file, open_folder, walk
from dualmcmc.data.formats.lmdb import open_lmdb
from dualmcmc.data.formats.npz import load_npz, npz_array
from dualmcmc.data.formats.parquet import open_parquet
from dualmcmc.data.source import ArraySource, ImageSource
from dualmcmc.utils.errors import UserError

SUPPORTED = "a folder, zip, tar, LMDB, parquet, npz, packed file or image"


def open_source(path: Path, keep: Keep | None = None) -> ImageSource:
    """The images at `path`, sorted by name (tar, LMDB, parquet, npz: as stored).

    `keep` selects images by name: their path inside the folder or archive.
    """
    path, array = npz_array(path)
    if not path.exists():
        raise UserError(f"'{path}' does not exist: expected {SUPPORTED}.")
    if path.is_dir():
        return _open_folder(path, keep)
    if not path.is_file():
        raise UserError(f"'{path}' is not {SUPPORTED}.")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return ArraySource(f"{path}:{array}" if array else str(path), lambda: load_npz(path, array))
    if suffix in (".mdb", ".lmdb"):
        return open_lmdb(path, keep)
    if suffix == ".parquet":
        return open_parquet(path, [path], keep)
    if path.name.lower().endswith(TAR_SUFFIXES):
        return open_tar_images(path, keep)
    if suffix == ".zip" or zipfile.is_zipfile(path):
        return open_zip_images(path, keep)
    if suffix in SUFFIXES:
        return open_file(path)
    raise UserError(f"'{path}' is not {SUPPORTED}.")


def _open_folder(path: Path, keep: Keep | None) -> ImageSource:
    """A folder may be an LMDB, or contain parquet shards instead of images."""
    if (path / "data.mdb").is_file():
        return open_lmdb(path, keep)
    try:
        return open_folder(path, keep)
    except NoImages:
        shards = sorted(file for file in walk(path) if file.suffix.lower() == ".parquet" and file.is_file())
        if not shards:
            raise
        return open_parquet(path, shards, keep)
