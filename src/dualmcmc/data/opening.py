"""From what a config or a command names to images that can be read: packed files first, official ones next."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from dualmcmc.data import pack
from dualmcmc.data.cache import cache_folder
from dualmcmc.data.containers import open_source, walk
from dualmcmc.data.images import Fit
from dualmcmc.data.sets import SETS, ImageSet, find_set, published
from dualmcmc.data.source import Source, Stored, bad_list, to_memory
from dualmcmc.data.store import Store
from dualmcmc.errors import UserError
from dualmcmc.files import make_folder
from dualmcmc.progress import Watch, quiet
from dualmcmc.words import plain

VERIFIED = 4 << 30  # bytes of a split up to which its pixels are compared with their checksum at each start


def folder_of(name: str) -> Path:
    """Where a named set lies in the cache."""
    return cache_folder() / name


def fetched(name: str, folder: Path | None = None) -> Path:
    """The packed file that fetching a named set makes, in the cache or where it was moved to."""
    return (folder or folder_of(name)) / f"{name}{pack.ENDING}"


def packed_name(name: str, fit: Fit) -> str:
    """The file name of a named set packed at a size and crop of its own."""
    grey = "-grey" if fit.channels == 1 else ""
    return f"{name}-{fit.size}-{fit.crop}-{fit.resize}{grey}{pack.ENDING}"


def open_sources(name: str, path: Path | None) -> dict[str, Source]:
    """The splits of a named set, or of a user's own images (name folder), as streams."""
    if path is not None and pack.is_pack(path):
        return _from_pack(path, name)
    if name == "folder":
        if path is None:
            raise UserError(
                "data.source=folder needs data.path: a folder, zip, tar, LMDB, parquet, npz or packed file."
            )
        return {"train": open_source(path)}
    chosen, where = find_set(name), path or folder_of(name)
    whole = fetched(name, where)
    found = _from_pack(whole, name) if whole.exists() else {}
    if name == "digits" or where.exists():
        found = chosen.read(where) | found  # files beside the packed one may have more splits
    if not found and (others := sorted(where.glob(f"{name}-*{pack.ENDING}"))):
        found = _from_pack(others[0], name)
    if not found:
        raise UserError(f"{chosen.title} is not in '{where}': {_how_to_get(chosen)}")
    return found


def _from_pack(path: Path, name: str) -> dict[str, Source]:
    return {split: Stored(f"{path}: {split}", store) for split, store in _read_pack(path, name)[0].items()}


def _read_pack(path: Path, name: str) -> tuple[dict[str, pack.Packed], dict[str, Any]]:
    """A packed file, which for a named set must be of that set."""
    splits, info = pack.read(path)
    if name != "folder" and info.get("name") != name:
        raise UserError(
            f"'{path}' was packed from '{plain(str(info.get('name')))}', not from {name}: use data.source=folder."
        )
    return splits, info


def _how_to_get(chosen: ImageSet) -> str:
    what = "says what to download" if chosen.by_hand else "gets it"
    where = "data.path=... in training, --path in 'dualmcmc data', else NAME=PATH"
    return f"'dualmcmc data fetch {chosen.name}' {what}; if it lies elsewhere, say where ({where})."


def is_complete(name: str, splits: Mapping[str, Sized]) -> bool:
    """Whether a set has as many images as were published."""
    return all(len(splits.get(split, ())) == count for split, count in published(name, splits).items())


def open_stores(
    name: str,
    path: Path | None,
    wanted: Sequence[str],
    fit: Fit,
    skip_bad: bool = False,
    watch: Watch = quiet,
    notes: list[str] | None = None,
) -> dict[str, Store]:
    """The wanted splits at one size, those that are there. Large sets are packed once, into the cache.

    What a person should know of (images left out, a set that is here in part) is added to `notes`.
    """
    notes = notes if notes is not None else []
    found = _stores(name, path, wanted, fit, skip_bad, watch, notes)
    counts = published(name, found)
    for split, store in found.items():
        if len(store) != counts.get(split, len(store)):
            notes.append(f"{name}: {len(store):,} of {counts[split]:,} {split} images are here")
        if isinstance(store, pack.Packed) and store.nbytes <= VERIFIED and not store.is_intact():
            raise UserError(f"'{store.path}' is damaged: its pixels are not those packed. Fetch or pack it again.")
    if "test" in counts and "test" in wanted and "test" not in found:
        notes.append(f"{name}: its test split is not here")
    return found


def _stores(
    name: str, path: Path | None, wanted: Sequence[str], fit: Fit, skip_bad: bool, watch: Watch, notes: list[str]
) -> dict[str, Store]:
    if path is not None and pack.is_pack(path):
        return _fitting(path, name, fit, wanted, watch, notes)
    if name in SETS:
        where = path or folder_of(name)
        made, whole = where / packed_name(name, fit), fetched(name, where)
        if whole.exists() and set(wanted) <= set(pack.read(whole)[0]):
            own_size = fit.size == SETS[name].size
            return _fitting(whole if own_size or not made.exists() else made, name, fit, wanted, watch, notes)
        if made.exists() and _is_current(SETS[name], made, skip_bad):
            return _fitting(made, name, fit, wanted, watch, notes)
        if path is None and SETS[name].by_hand and os.access(where, os.W_OK):
            info = {"name": name, "stamp": stamp(where)}
            pack_sources(open_sources(name, None), made, fit, info, skip_bad, watch)
            return _fitting(made, name, fit, wanted, watch, notes)
    sources = {split: source for split, source in open_sources(name, path).items() if split in wanted}
    stores: dict[str, Store] = {}
    for split, source in sources.items():
        stores[split] = to_memory(source, fit, skip_bad, watch)
        if source.skipped:
            notes.append(f"left out: {bad_list(source.skipped)}")
    return stores


def _is_current(chosen: ImageSet, path: Path, skip_bad: bool) -> bool:
    """Whether a set that was packed need not be packed again: it is complete, or its files are as they were."""
    splits, info = pack.read(path)
    if is_complete(chosen.name, splits):
        return True
    here = chosen.read(path.parent)
    if here and info.get("stamp") == stamp(path.parent):
        return skip_bad or not info.get("left_out")  # what was left out then is refused now
    # Where most of the files were deleted, what is packed is more than what is left.
    return all((source.count or 0) < len(splits.get(split, ())) for split, source in here.items())


def stamp(folder: Path) -> str:
    """Changes when a file of a set is added, removed or changed."""
    digest = hashlib.sha256()
    for file in sorted(walk(folder)):
        if file.suffix != pack.ENDING and not file.name.startswith(".") and file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _fitting(
    path: Path, name: str, fit: Fit, wanted: Sequence[str], watch: Watch, notes: list[str]
) -> dict[str, Store]:
    """The splits of a packed file that must be of a size and crop, or of a set's own size."""
    splits, info = _read_pack(path, name)
    chosen = {split: store for split, store in splits.items() if split in wanted}
    notes.extend(
        f"left out when it was packed: {plain(text, 2000)}"
        for key, text in info.get("left_out", {}).items()
        if key in chosen
    )
    if info.get("crop") is None:  # as published: nothing was cut, so another size can still be made
        return {split: _refitted(path, split, store, fit, watch) for split, store in chosen.items()}
    for store in splits.values():
        made = {"size": store.shape[2], "channels": store.shape[1], "crop": info["crop"], "resize": info.get("resize")}
        asked = {key: getattr(fit, key) for key in made}
        if made != asked:
            fix = plain(" ".join(f"data.{key}={value}" for key, value in made.items() if asked[key] != value), 200)
            raise UserError(f"'{path}' was packed otherwise: it needs {fix}; or pack the images again.")
    return dict(chosen)


def _refitted(path: Path, split: str, store: Store, fit: Fit, watch: Watch) -> Store:
    """A store of images as published, at another size or crop where that is asked for."""
    _, channels, height, width = store.shape
    uncut = fit.crop in ("center", "none") and height == width == fit.size
    if uncut and channels == fit.channels:
        return store
    return to_memory(Stored(f"{path}: {split}", store), fit, watch=watch)


def pack_sources(
    sources: Mapping[str, Source],
    out: Path,
    fit: Fit,
    info: dict[str, Any],
    skip_bad: bool = False,
    watch: Watch = quiet,
) -> dict[str, dict[str, Any]]:
    """Pack splits at one size; returns what each holds, and what was left out."""
    if fit.size is None or fit.channels is None:
        raise ValueError("a packed file needs a size and a number of channels")
    make_folder(out.parent)
    streams = {split: source.images(fit, skip_bad, watch) for split, source in sources.items()}

    def note() -> dict[str, Any]:  # when all have been through
        left_out = {split: bad_list(source.skipped)[:2000] for split, source in sources.items() if source.skipped}
        return {**info, "crop": fit.crop, "resize": fit.resize, "left_out": left_out}

    made = pack.write(out, streams, (fit.channels, fit.size, fit.size), note)
    return {
        split: {**entry, "skipped": [f"{name}: {reason}" for name, reason in sources[split].skipped]}
        for split, entry in made.items()
    }
