"""The images a task works on: the run's own, or a user's, converted to the run's size and colour mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualmcmc import data
from dualmcmc.data import pack
from dualmcmc.data.catalog import CATALOG
from dualmcmc.data.formats.npz import npz_array
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import open_stores
from dualmcmc.data.store import ImageStore, SubsetStore
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.tasks.run import Run
from dualmcmc.tasks.work import step_progress
from dualmcmc.utils.errors import UserError, nearest
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.images import as_float
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_SHAPES = 3  # named in a note


class TaskImages(NamedTuple):
    """Images, a name for them, and their origin for the result file."""

    store: ImageStore
    what: str
    origin: dict[str, Any]  # "notes": messages for the user

    def subset(self, count: int | None, seed: int) -> TaskImages:
        """At most `count` of the images, chosen by the seed, since datasets are often sorted by class."""
        store = choose(self.store, count, seed)
        if store is self.store:
            return self
        return TaskImages(store, self.what, {**self.origin, "used": f"{len(store)} of {len(self.store)}"})


def choose(store: ImageStore, count: int | None, seed: int) -> ImageStore:
    """At most `count` images of a store, chosen by the seed; all if None."""
    if count is not None and count < 1:
        raise UserError(f"the number of images must be at least 1, not {count}.")
    if count is None or count >= len(store):
        return store
    return SubsetStore(store, np.sort(np.random.default_rng(seed).permutation(len(store))[:count]))


def images_for(run: Run, path: Path | str | None = None, progress: ProgressFactory = no_progress) -> TaskImages:
    """A user's images at `path`, with the crop, resize and skip_bad of `run.config.data`, or the run's own.

    Conversions are noted; a packed file of another shape is refused.
    """
    if path is not None:
        return _open(run, "folder", Path(path), progress, f"images of {path}")
    check_no_image_overrides(run)
    return held_out_images(run, progress)


def held_out_images(run: Run, progress: ProgressFactory = no_progress) -> TaskImages:
    """The run's held-out images, or its training images if there are none."""
    splits = run.load_data(progress)
    return TaskImages(*splits.test_or_train(), data.describe(run.trained_data, splits))


def check_no_image_overrides(run: Run) -> None:
    """Raise `UserError` if a setting for other images was overridden and only the run's own are used."""
    for name in ("crop", "resize", "skip_bad"):
        if getattr(run.config.data, name) != getattr(run.trained_data, name):
            raise UserError(f"data.{name} applies to --images only: the run's own images keep theirs.")


def parse_dataset(word: str) -> tuple[str, Path | None, str | None]:
    """Name, path and split from NAME, NAME:SPLIT, NAME=PATH or NAME:SPLIT=PATH of a named dataset, or from a path."""
    head, equals, place = word.partition("=")
    name, colon, split = head.partition(":")
    if name in CATALOG:
        if colon and not split:
            raise UserError(f"'{word}' has no split after the colon: use {name}:test, or {name}.")
        if equals and not place:
            raise UserError(f"'{word}' has no path: use {name}=PATH, or {name} for the one in the cache folder.")
        return name, expand_user(place) if place else None, split or None
    path = expand_user(word)
    if not word or not npz_array(path)[0].exists():
        hint = nearest(name.lower(), CATALOG)
        raise UserError(f"'{word}' is neither a named dataset nor an existing path.{hint} See 'dualmcmc data list'.")
    return "folder", path, None


def dataset_for(run: Run, word: str, progress: ProgressFactory = no_progress) -> tuple[str, TaskImages]:
    """Another dataset (see `parse_dataset`) and its name; its test split, if it has one and no split is named."""
    name, path, split = parse_dataset(word)
    if path is None or name != "folder":
        return name, _open(run, name, path, progress, f"{CATALOG[name].title} images", split)
    return path.resolve().name, _open(run, name, path, progress, f"images of {path}")


def _open(
    run: Run, name: str, path: Path | None, progress: ProgressFactory, what: str, split: str | None = None
) -> TaskImages:
    cfg = run.config.data
    notes: list[str] = []
    spec = ImageSpec.from_config(cfg)
    if path is not None and pack.is_pack(path):
        _check_pack_shape(run, path)
    stores = open_stores(name, path, (split,) if split else ("test", "train"), spec, cfg.skip_bad, progress, notes)
    if not stores:
        raise UserError(f"{path or name} has no split '{split or 'train or test'}'.")
    split = split or ("test" if "test" in stores else "train")
    notes += conversion_notes(what, spec)
    store = stores[split]
    origin = {"source": name, "path": None if path is None else str(path), "split": split, "images": len(store)}
    origin |= {"size": cfg.size, "channels": cfg.channels, "crop": spec.crop, "resize": spec.resize}
    return TaskImages(store, what, {**origin, "checksum": data.fingerprint(store), "notes": notes})


def conversion_notes(what: str, spec: ImageSpec) -> list[str]:
    """A note on the images that were converted, if any."""
    if not spec.converted:
        return []
    shapes = sorted(spec.converted)
    more = f" and {len(shapes) - MAX_SHAPES} other shapes" if len(shapes) > MAX_SHAPES else ""
    return [
        f"{what}: converted to {spec.size}x{spec.size} {'greyscale' if spec.channels == 1 else 'RGB'} from "
        f"{', '.join(shapes[:MAX_SHAPES])}{more} (crop {spec.crop}, resize {spec.resize})"
    ]


def _check_pack_shape(run: Run, path: Path) -> None:
    """Refuse a packed file of another shape; `open_stores` would suggest settings that a trained run cannot change."""
    cfg = run.config.data
    splits, info = pack.read(path)
    for store in splits.values():
        _, channels, height, width = store.shape
        if info.get("crop") is not None and (channels, height, width) != (cfg.channels, cfg.size, cfg.size):
            raise UserError(
                f"'{path}' contains {width}x{height} images with {channels} channel(s), but this run was trained on "
                f"{cfg.size}x{cfg.size} with {cfg.channels}: pack them again with --size {cfg.size} "
                f"--channels {cfg.channels}."
            )


def batches(
    run: Run,
    store: ImageStore,
    progress: ProgressFactory = no_progress,
    task: str = "",
    steps: int = 1,
    world: World = SINGLE_PROCESS,
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Batches of equal size, at most `sampling.batch`: indices, and images in [-1, 1] on the run's device.

    `steps`, for the progress: those of the chains of an image, and one for the rest of the work. Each process of
    `world` gets its own batches.
    """
    parts = np.array_split(np.arange(len(store)), max(1, -(-len(store) // run.config.sampling.batch)))
    with step_progress(run, progress, task, len(store), steps, world) as count:
        for part in parts[world.rank :: world.size]:
            yield part, as_float(store.take(part).to(run.device))
            count(len(part), 1)
