"""The images a task works on: the run's own, or those a user brings, in the run's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.crew import ALONE, Crew
from dualmcmc.data import pack
from dualmcmc.data.containers import npz_array
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_stores
from dualmcmc.data.sets import SETS
from dualmcmc.data.store import Store, Subset
from dualmcmc.errors import UserError, nearest
from dualmcmc.pictures import from_uint8
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.run import Run

SHOWN = 3  # shapes named in a note


class Given(NamedTuple):
    """Images to work on, what they are in words, and what they are for the record."""

    store: Store
    what: str
    origin: dict[str, Any]  # "notes" among it: what a person should know

    def some(self, count: int | None, seed: int) -> Given:
        """At most `count` of them, chosen by the seed: sets are often ordered by class."""
        if count is None or count >= len(self.store):
            return self
        if count < 1:
            raise UserError(f"-n must be at least 1, not {count}.")
        chosen = np.sort(np.random.default_rng(seed).permutation(len(self.store))[:count])
        return Given(Subset(self.store, chosen), self.what, {**self.origin, "used": f"{count} of {len(self.store)}"})


def images_for(
    run: Run, path: Path | str | None = None, crop: Crop | None = None, skip_bad: bool = False, watch: Watch = quiet
) -> Given:
    """A user's images at `path`, brought to the run's shape, or the run's own held-out ones.

    `crop`: another than the run's, for images at `path`. What had to be converted is noted; a packed
    file of another shape is refused.
    """
    if path is not None:
        return _opened(run, "folder", Path(path), crop, skip_bad, watch, f"images of {path}")
    own = data.load(run.config.data, watch)
    return Given(*own.held_out(), data.describe(run.config.data, own))


def parse_set(word: str) -> tuple[str, Path | None, str | None]:
    """NAME, NAME:SPLIT, NAME=PATH or NAME:SPLIT=PATH of a named set, or a place: the name, where, which split."""
    head, equals, place = word.partition("=")
    name, colon, split = head.partition(":")
    if name in SETS:
        if colon and not split:
            raise UserError(f"'{word}' names no split: write {name}:test, or {name} alone.")
        if equals and not place:
            raise UserError(f"'{word}' names no place: write {name}=PATH, or {name} for the one in the cache folder.")
        return name, Path(place).expanduser() if place else None, split or None
    path = Path(word).expanduser()
    if not word or not npz_array(path)[0].exists():
        hint = nearest(name.lower(), SETS)
        raise UserError(f"'{word}' is no named set and no place.{hint} See 'dualmcmc data list'.")
    return "folder", path, None


def set_for(
    run: Run, word: str, crop: Crop | None = None, skip_bad: bool = False, watch: Watch = quiet
) -> tuple[str, Given]:
    """Another set to hold against the run (see `parse_set`); its test split where it has one and none is named."""
    name, path, split = parse_set(word)
    if path is None or name != "folder":
        return name, _opened(run, name, path, crop, skip_bad, watch, f"{SETS[name].title} images", split)
    return path.resolve().name, _opened(run, name, path, crop, skip_bad, watch, f"images of {path}")


def _opened(
    run: Run,
    name: str,
    path: Path | None,
    crop: Crop | None,
    skip_bad: bool,
    watch: Watch,
    what: str,
    split: str | None = None,
) -> Given:
    cfg = run.config.data
    notes: list[str] = []
    fit = replace(Fit.of(cfg), crop=crop or cfg.crop)
    if path is not None and pack.is_pack(path):
        _check_shape(run, path)
    found = open_stores(name, path, (split,) if split else ("test", "train"), fit, skip_bad, watch, notes)
    if not found:
        raise UserError(f"{path or name} has no split '{split or 'train or test'}'.")
    split = split or ("test" if "test" in found else "train")
    notes += conversion_notes(what, fit)
    store = found[split]
    origin = {"source": name, "path": None if path is None else str(path), "split": split, "images": len(store)}
    origin |= {"size": cfg.size, "channels": cfg.channels, "crop": fit.crop, "resize": fit.resize}
    return Given(store, what, {**origin, "checksum": data.fingerprint(store), "notes": notes})


def conversion_notes(what: str, fit: Fit) -> list[str]:
    """What had to be converted on the way in, in words."""
    if not fit.converted:
        return []
    shapes = sorted(fit.converted)
    more = f" and {len(shapes) - SHOWN} other shapes" if len(shapes) > SHOWN else ""
    return [
        f"{what}: converted to {fit.size}x{fit.size} {'grey' if fit.channels == 1 else 'RGB'} from "
        f"{', '.join(shapes[:SHOWN])}{more} (crop {fit.crop}, resize {fit.resize})"
    ]


def _check_shape(run: Run, path: Path) -> None:
    """Refuse a packed file of another shape in terms of the run, whose settings cannot be changed any more."""
    cfg = run.config.data
    splits, info = pack.read(path)
    for store in splits.values():
        _, channels, height, width = store.shape
        if info.get("crop") is not None and (channels, height, width) != (cfg.channels, cfg.size, cfg.size):
            raise UserError(
                f"'{path}' holds {width}x{height} images of {channels} channel(s), and this run was trained on "
                f"{cfg.size}x{cfg.size} of {cfg.channels}: pack them again with --size {cfg.size} "
                f"--channels {cfg.channels}."
            )


def batches(
    run: Run, store: Store, watch: Watch = quiet, what: str = "", crew: Crew = ALONE
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """The images in even parts of at most `sampling.batch`: their numbers, and they in [-1, 1] on the device.

    Each process of a crew gets parts of its own.
    """
    parts = np.array_split(np.arange(len(store)), max(1, -(-len(store) // run.config.sampling.batch)))
    with watch(what, len(store), "images") as advance:
        for part in parts[crew.rank :: crew.world]:
            yield part, from_uint8(store.take(part).to(run.device))
            advance(len(part) * crew.world)
