"""Find and open the images of a named dataset or path: packed files first, then official files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from dualmcmc.data import pack
from dualmcmc.data.catalog import CATALOG, DatasetInfo, expected_counts, find_dataset
from dualmcmc.data.formats import open_source
from dualmcmc.data.formats.folder import walk
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.source import ImageSource, StoreSource, format_unreadable, to_memory
from dualmcmc.data.store import ImageStore
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.files import cache_folder, make_folder
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_VERIFIED = 4 << 30  # bytes: the checksum of a split up to this size is verified whenever it is opened
MAX_NOTE_LENGTH = 2000  # characters about skipped images


def dataset_folder(name: str) -> Path:
    """A named dataset's folder in the cache."""
    return cache_folder() / name


def fetched_pack(name: str, folder: Path | None = None) -> Path:
    """The packed file that `fetch` creates, in the cache or in `folder`."""
    return (folder or dataset_folder(name)) / f"{name}{pack.SUFFIX}"


def pack_filename(name: str, spec: ImageSpec) -> str:
    """The file name of a named dataset packed with `spec`."""
    grey = "-grey" if spec.channels == 1 else ""
    return f"{name}-{spec.size}-{spec.crop}-{spec.resize}{grey}{pack.SUFFIX}"


def open_sources(name: str, path: Path | None) -> dict[str, ImageSource]:
    """The splits of a named dataset, or of the images at `path` (name "folder")."""
    if path is not None and pack.is_pack(path):
        return _pack_sources(path, name)
    if name == "folder":
        if path is None:
            raise UserError(
                "data.source=folder needs data.path: a folder, zip, tar, LMDB, parquet, npz or packed file."
            )
        return {"train": open_source(path)}
    dataset, folder = find_dataset(name), path or dataset_folder(name)
    fetched = fetched_pack(name, folder)
    sources = _pack_sources(fetched, name) if fetched.exists() else {}
    if name == "digits" or folder.exists():
        sources = dataset.read(folder) | sources  # official files may contain more splits than the packed file
    if not sources and (packs := sorted(folder.glob(f"{name}-*{pack.SUFFIX}"))):
        sources = _pack_sources(packs[0], name)
    if not sources:
        own = "" if path is None else " For images of your own, add data.source=folder (in training)."
        raise UserError(f"{dataset.title} is not in '{folder}': {_how_to_get(dataset)}{own}")
    return sources


def _pack_sources(path: Path, name: str) -> dict[str, ImageSource]:
    return {split: StoreSource(f"{path}: {split}", store) for split, store in _read_pack(path, name)[0].items()}


def _read_pack(path: Path, name: str) -> tuple[dict[str, pack.PackedStore], dict[str, Any]]:
    """Read a packed file; that of a named dataset must contain this dataset."""
    splits, info = pack.read(path)
    if name != "folder" and info.get("name") != name:
        raise UserError(f"'{path}' contains '{sanitize(str(info.get('name')))}', not {name}: use data.source=folder.")
    return splits, info


def _how_to_get(dataset: DatasetInfo) -> str:
    action = "see" if dataset.manual_instructions else "run"
    return (
        f"{action} 'dualmcmc data fetch {dataset.name}', or name its folder (data.path=... in training, --path in "
        "'dualmcmc data', NAME=PATH elsewhere)."
    )


def is_complete(name: str, splits: Mapping[str, Sized]) -> bool:
    """Whether each split has the published number of images."""
    return all(len(splits.get(split, ())) == count for split, count in expected_counts(name, splits).items())


def open_stores(
    name: str,
    path: Path | None,
    wanted: Sequence[str],
    spec: ImageSpec,
    skip_bad: bool = False,
    progress: ProgressFactory = no_progress,
    notes: list[str] | None = None,
) -> dict[str, ImageStore]:
    """Those of the wanted splits that exist, converted to `spec`. Large datasets are packed once, in the cache.

    Skipped images and missing parts of a dataset are added to `notes`.
    """
    notes = notes if notes is not None else []
    stores = _open_stores(name, path, wanted, spec, skip_bad, progress, notes)
    counts = expected_counts(name, stores)
    for split, store in stores.items():
        if len(store) != counts.get(split, len(store)):
            notes.append(f"{name}: {len(store):,} of {counts[split]:,} {split} images found")
        if isinstance(store, pack.PackedStore) and store.nbytes <= MAX_VERIFIED and not store.is_intact():
            raise UserError(f"'{store.path}' is damaged: fetch the dataset or pack the images again.")
    if "test" in counts and "test" in wanted and "test" not in stores:
        notes.append(f"{name}: no test split found")
    return stores


def _open_stores(
    name: str,
    path: Path | None,
    wanted: Sequence[str],
    spec: ImageSpec,
    skip_bad: bool,
    progress: ProgressFactory,
    notes: list[str],
) -> dict[str, ImageStore]:
    if path is not None and pack.is_pack(path):
        return _open_pack(path, name, spec, wanted, progress, notes)
    if name in CATALOG:
        folder = path or dataset_folder(name)
        converted, fetched = folder / pack_filename(name, spec), fetched_pack(name, folder)
        if fetched.exists() and set(wanted) <= set(pack.read(fetched)[0]):
            own_size = spec.size == CATALOG[name].size
            best = fetched if own_size or not converted.exists() else converted
            return _open_pack(best, name, spec, wanted, progress, notes)
        if converted.exists() and _is_current(CATALOG[name], converted, skip_bad):
            return _open_pack(converted, name, spec, wanted, progress, notes)
        if path is None and CATALOG[name].manual_instructions and os.access(folder, os.W_OK):
            info = {"name": name, "stamp": stamp(folder)}
            pack_sources(open_sources(name, None), converted, spec, info, skip_bad, progress)
            return _open_pack(converted, name, spec, wanted, progress, notes)
    stores: dict[str, ImageStore] = {}
    for split, source in open_sources(name, path).items():
        if split in wanted:
            stores[split] = to_memory(source, spec, skip_bad, progress)
            if source.skipped:
                notes.append(f"skipped: {format_unreadable(source.skipped)}")
    return stores


def _is_current(dataset: DatasetInfo, path: Path, skip_bad: bool) -> bool:
    """Whether a packed file can be used as it is: it is complete, or the official files have not changed."""
    splits, info = pack.read(path)
    if is_complete(dataset.name, splits):
        return True
    sources = dataset.read(path.parent)
    if sources and info.get("stamp") == stamp(path.parent):
        return skip_bad or not info.get("skipped")
    # If most official files were deleted, the packed file contains more than they do.
    return all((source.count or 0) < len(splits.get(split, ())) for split, source in sources.items())


def stamp(folder: Path) -> str:
    """A hash that changes when an official file is added, removed or modified."""
    digest = hashlib.sha256()
    for file in sorted(walk(folder)):
        if file.suffix != pack.SUFFIX and not file.name.startswith(".") and file.is_file():
            status = file.stat()
            digest.update(f"{file.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _open_pack(
    path: Path, name: str, spec: ImageSpec, wanted: Sequence[str], progress: ProgressFactory, notes: list[str]
) -> dict[str, ImageStore]:
    """The wanted splits of a packed file. Unmodified images are converted to `spec`, others must match it."""
    splits, info = _read_pack(path, name)
    stores = {split: store for split, store in splits.items() if split in wanted}
    notes.extend(
        f"skipped when packed: {sanitize(text, MAX_NOTE_LENGTH)}"
        for split, text in info.get("skipped", {}).items()
        if split in stores
    )
    if info.get("crop") is None:  # unmodified
        return {split: _converted(path, split, store, spec, progress) for split, store in stores.items()}
    for store in splits.values():
        _, channels, size, _ = store.shape
        packed = {"size": size, "channels": channels, "crop": info["crop"], "resize": info.get("resize")}
        different = [key for key, value in packed.items() if getattr(spec, key) != value]
        if different:
            needed = sanitize(" ".join(f"data.{key}={packed[key]}" for key in different), 200)
            raise UserError(f"'{path}' was packed with other settings: use {needed}, or pack the images again.")
    return dict(stores)


def _converted(path: Path, split: str, store: ImageStore, spec: ImageSpec, progress: ProgressFactory) -> ImageStore:
    """`store`, or a copy in memory if its images have to be converted."""
    _, channels, height, width = store.shape
    if spec.crop in ("center", "none") and height == width == spec.size and channels == spec.channels:
        return store
    return to_memory(StoreSource(f"{path}: {split}", store), spec, progress=progress)


def pack_sources(
    sources: Mapping[str, ImageSource],
    out: Path,
    spec: ImageSpec,
    info: dict[str, Any],
    skip_bad: bool = False,
    progress: ProgressFactory = no_progress,
) -> dict[str, dict[str, Any]]:
    """Pack splits, converted to `spec`; returns count, SHA-256 and skipped images of each."""
    if spec.size is None or spec.channels is None:
        raise ValueError("pack_sources() needs a size and a number of channels")
    make_folder(out.parent)
    streams = {split: source.images(spec, skip_bad, progress) for split, source in sources.items()}

    def final_info() -> dict[str, Any]:  # complete after the last image
        skipped = {
            split: format_unreadable(source.skipped)[:MAX_NOTE_LENGTH]
            for split, source in sources.items()
            if source.skipped
        }
        return {**info, "crop": spec.crop, "resize": spec.resize, "skipped": skipped}

    written = pack.write(out, streams, (spec.channels, spec.size, spec.size), final_info)
    return {
        split: {**entry, "skipped": [f"{name}: {reason}" for name, reason in sources[split].skipped]}
        for split, entry in written.items()
    }
