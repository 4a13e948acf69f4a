"""From what a config or a command names to images that can be read: packed files first, official ones next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dualmcmc.data import pack
from dualmcmc.data.cache import cache_folder
from dualmcmc.data.containers import open_source
from dualmcmc.data.images import Fit
from dualmcmc.data.sets import SETS, ImageSet, find_set
from dualmcmc.data.source import Source, Stored, to_memory
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
        return _from_pack(path)
    if name == "folder":
        if path is None:
            raise UserError(
                "data.source=folder needs data.path: a folder, zip, tar, LMDB, parquet, npz or packed file."
            )
        return {"train": open_source(path)}
    chosen, where = find_set(name), path or folder_of(name)
    found = _from_pack(where / f"{name}{pack.ENDING}") if (where / f"{name}{pack.ENDING}").exists() else {}
    if name == "digits" or where.exists():
        found = chosen.read(where) | found  # files beside the packed one may have more splits
    if not found and (others := sorted(where.glob(f"{name}-*{pack.ENDING}"))):
        found = _from_pack(others[0])
    if not found:
        raise UserError(f"{chosen.title} is not in '{where}': {_how_to_get(chosen)}")
    return found


def _from_pack(path: Path) -> dict[str, Source]:
    return {split: Stored(f"{path}: {split}", store) for split, store in pack.read(path)[0].items()}


def _how_to_get(chosen: ImageSet) -> str:
    what = "says what to download" if chosen.by_hand else "gets it"
    return f"'dualmcmc data fetch {chosen.name}' {what}, or data.path=... says where it is."


def open_stores(
    name: str, path: Path | None, wanted: Sequence[str], fit: Fit, skip_bad: bool = False, watch: Watch = quiet
) -> dict[str, Store]:
    """The wanted splits at one size, those that are there. Large sets are packed once, into the cache."""
    if path is not None and pack.is_pack(path):
        return _fitting(path, fit, wanted, watch)
    if name in SETS:
        where = path or folder_of(name)
        made, whole = where / packed_name(name, fit), where / f"{name}{pack.ENDING}"
        if made.exists() and _is_whole(SETS[name], made):
            return _fitting(made, fit, wanted, watch)
        if whole.exists() and set(wanted) <= set(pack.read(whole)[0]):
            return _fitting(whole, fit, wanted, watch)
        if path is None and SETS[name].by_hand:
            pack_sources(open_sources(name, None), made, fit, {"name": name}, skip_bad, watch)
            return _fitting(made, fit, wanted, watch)
    sources = open_sources(name, path)
    return {split: to_memory(source, fit, skip_bad, watch) for split, source in sources.items() if split in wanted}


def _is_whole(chosen: ImageSet, path: Path) -> bool:
    """Whether a packed set has all that there is: as many images as published, or as the files beside it."""
    held = {split: len(store) for split, store in pack.read(path)[0].items()}
    if all(held.get(split) == count for split, count in chosen.splits.items()):
        return True
    here = chosen.read(path.parent)
    return all(source.count in (None, held.get(split)) for split, source in here.items())


def _fitting(path: Path, fit: Fit, wanted: Sequence[str], watch: Watch) -> dict[str, Store]:
    """The splits of a packed file that must be of a size and crop, or of a set's own size."""
    splits, info = pack.read(path)
    chosen = {split: store for split, store in splits.items() if split in wanted}
    if info.get("crop") is None:  # as published: nothing was cut, so another size can still be made
        return {
            split: store
            if store.shape[1:] == (fit.channels, fit.size, fit.size)
            else to_memory(Stored(f"{path}: {split}", store), fit, watch=watch)
            for split, store in chosen.items()
        }
    for store in splits.values():
        made = {"size": store.shape[2], "channels": store.shape[1], "crop": info["crop"], "resize": info.get("resize")}
        asked = {key: getattr(fit, key) for key in made}
        if made != asked:
            fix = " ".join(f"data.{key}={value}" for key, value in made.items() if asked[key] != value)
            raise UserError(f"'{path}' was packed otherwise: use {fix}, or pack the images again.")
    return dict(chosen)


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
    note = {**info, "crop": fit.crop, "resize": fit.resize}
    made = pack.write(out, streams, (fit.channels, fit.size, fit.size), note)
    for split, source in sources.items():
        made[split]["skipped"] = source.skipped or []
    return made
