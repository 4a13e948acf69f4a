"""From what a config or a command names to images that can be read: packed files first, official ones next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from dualmcmc.data import pack
from dualmcmc.data.cache import cache_folder
from dualmcmc.data.containers import open_source
from dualmcmc.data.images import Fit
from dualmcmc.data.sets import SETS, ImageSet, find_set
from dualmcmc.data.source import Source, Stored, bad_list, to_memory
from dualmcmc.data.store import Store
from dualmcmc.errors import UserError
from dualmcmc.files import make_folder
from dualmcmc.progress import Watch, quiet


def folder_of(name: str) -> Path:
    """Where a named set lies in the cache."""
    return cache_folder() / name


def fetched(name: str) -> Path:
    """The packed file that fetching a named set makes."""
    return folder_of(name) / f"{name}{pack.ENDING}"


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
    whole = where / f"{name}{pack.ENDING}"
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
        raise UserError(f"'{path}' was packed from '{info.get('name')}', not from {name}: use data.source=folder.")
    return splits, info


def _how_to_get(chosen: ImageSet) -> str:
    what = "says what to download" if chosen.by_hand else "gets it"
    return f"'dualmcmc data fetch {chosen.name}' {what}; if it lies elsewhere, say where (data.path=..., or --path)."


def is_complete(chosen: ImageSet, splits: Mapping[str, Sized]) -> bool:
    """Whether a set has as many images as were published; SVHN's extra ones need not be there."""
    return all(len(splits.get(split, ())) == count for split, count in chosen.splits.items() if split != "extra")


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
    published = SETS[name].splits if name in SETS else {}
    for split, store in found.items():
        if len(store) != published.get(split, len(store)):
            notes.append(f"{name}: {len(store):,} of {published[split]:,} {split} images are here")
    return found


def _stores(
    name: str, path: Path | None, wanted: Sequence[str], fit: Fit, skip_bad: bool, watch: Watch, notes: list[str]
) -> dict[str, Store]:
    if path is not None and pack.is_pack(path):
        return _fitting(path, name, fit, wanted, watch)
    if name in SETS:
        where = path or folder_of(name)
        made, whole = where / packed_name(name, fit), where / f"{name}{pack.ENDING}"
        if whole.exists() and set(wanted) <= set(pack.read(whole)[0]):
            return _fitting(whole, name, fit, wanted, watch)
        if made.exists() and _is_whole(SETS[name], made):
            return _fitting(made, name, fit, wanted, watch)
        if path is None and SETS[name].by_hand and os.access(where, os.W_OK):
            sources = open_sources(name, None)
            pack_sources(sources, made, fit, {"name": name}, skip_bad, watch)
            _note_skipped(sources, notes)
            return _fitting(made, name, fit, wanted, watch)
    sources = {split: source for split, source in open_sources(name, path).items() if split in wanted}
    stores: dict[str, Store] = {
        split: to_memory(source, fit, skip_bad, watch) for split, source in sources.items() if split in wanted
    }
    _note_skipped(sources, notes)
    return stores


def _note_skipped(sources: Mapping[str, Source], notes: list[str]) -> None:
    notes.extend(f"left out: {bad_list(source.skipped)}" for source in sources.values() if source.skipped)


def _is_whole(chosen: ImageSet, path: Path) -> bool:
    """Whether a packed set has all that there is: as many images as published, or as the files beside it."""
    splits, info = pack.read(path)
    if is_complete(chosen, splits):
        return True
    held = {split: len(store) + info.get("skipped", {}).get(split, 0) for split, store in splits.items()}
    return all(source.count in (None, held.get(split)) for split, source in chosen.read(path.parent).items())


def _fitting(path: Path, name: str, fit: Fit, wanted: Sequence[str], watch: Watch) -> dict[str, Store]:
    """The splits of a packed file that must be of a size and crop, or of a set's own size."""
    splits, info = _read_pack(path, name)
    chosen = {split: store for split, store in splits.items() if split in wanted}
    if info.get("crop") is None:  # as published: nothing was cut, so another size can still be made
        return {split: _refitted(path, split, store, fit, watch) for split, store in chosen.items()}
    for store in splits.values():
        made = {"size": store.shape[2], "channels": store.shape[1], "crop": info["crop"], "resize": info.get("resize")}
        asked = {key: getattr(fit, key) for key in made}
        if made != asked:
            fix = " ".join(f"data.{key}={value}" for key, value in made.items() if asked[key] != value)
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
        skipped = {split: len(source.skipped) for split, source in sources.items()}
        return {**info, "crop": fit.crop, "resize": fit.resize, "skipped": skipped}

    made = pack.write(out, streams, (fit.channels, fit.size, fit.size), note)
    return {split: {**entry, "skipped": list(sources[split].skipped)} for split, entry in made.items()}
