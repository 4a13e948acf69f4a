"""LMDB databases with one encoded image per value, as LSUN uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualmcmc.data.formats.folder import Keep, NoImages
from dualmcmc.data.source import EncodedImage, FileSource, ImageSource, InMemory
from dualmcmc.utils.errors import UserError, first_line, sanitize
from dualmcmc.utils.extras import require

LSUN_FOLDERS = {"train": "church_outdoor_train_lmdb", "test": "church_outdoor_val_lmdb"}


def open_lmdb(path: Path, keep: Keep | None = None) -> ImageSource:
    """The images of an LMDB, in the order of the keys."""
    lmdb = require("lmdb", "data", "reading an LMDB")

    def connect() -> Any:
        return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False, create=False)

    def listing() -> Iterator[EncodedImage]:
        try:
            with connect() as environment, environment.begin(buffers=False) as transaction:
                for key, value in transaction.cursor():
                    name = key.decode(errors="replace")
                    if keep is None or keep(name):
                        yield f"{path}:{sanitize(name, 300)}", InMemory(value)
        except lmdb.Error as error:
            raise UserError(f"cannot read the LMDB '{path}': {first_line(error)}.") from None

    try:
        with connect() as environment:
            count = environment.stat()["entries"]
    except lmdb.Error as error:
        raise UserError(f"cannot read the LMDB '{path}': {first_line(error)}.") from None
    if count == 0:
        raise NoImages(f"'{path}' contains no images.")
    return FileSource(str(path), listing, count if keep is None else None)


def read_lsun(path: Path) -> dict[str, ImageSource]:
    """LSUN's LMDBs in `path`, or `path` itself; the validation images are `test`."""
    if (path / "data.mdb").is_file():
        split = "test" if path.name == LSUN_FOLDERS["test"] else "train"
        return {split: open_lmdb(path)}
    sources: dict[str, ImageSource] = {}
    for split, folder in LSUN_FOLDERS.items():
        if (path / folder / "data.mdb").is_file():
            sources[split] = open_lmdb(path / folder)
        elif (path / f"{folder}.zip").is_file():
            raise UserError(f"unpack '{path / folder}.zip' first: an LMDB cannot be read inside a zip.")
    return sources
