"""LSUN's churches: the official LMDBs, whose values are encoded images."""

from __future__ import annotations

from pathlib import Path

from dualmcmc.data.containers import open_source
from dualmcmc.data.source import Source
from dualmcmc.errors import UserError

FOLDERS = {"train": "church_outdoor_train_lmdb", "test": "church_outdoor_val_lmdb"}


def read(path: Path) -> dict[str, Source]:
    """The LMDBs in `path`, or `path` itself; LSUN's validation set counts as test."""
    if (path / "data.mdb").is_file():
        split = "test" if path.name == FOLDERS["test"] else "train"
        return {split: open_source(path)}
    found: dict[str, Source] = {}
    for split, folder in FOLDERS.items():
        if (path / folder / "data.mdb").is_file():
            found[split] = open_source(path / folder)
        elif (path / f"{folder}.zip").is_file():
            raise UserError(f"'{path / folder}.zip' must be unpacked first: an LMDB cannot be read inside a zip.")
    return found
