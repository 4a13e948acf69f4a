"""FID between any two sets of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_stores
from dualmcmc.data.sets import SETS
from dualmcmc.errors import UserError, nearest
from dualmcmc.metrics.features import Features
from dualmcmc.metrics.frechet import frechet_distance
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.reference import reference


def distance(
    first: str,
    second: str,
    features: Features,
    size: int | None = None,
    crop: Crop = "center",
    skip_bad: bool = False,
    watch: Watch = quiet,
) -> tuple[str, float, list[dict[str, Any]]]:
    """Between two sets, each NAME, NAME:SPLIT or PATH: what it may be called, the distance, and what the sets are."""
    places = [_place(word) for word in (first, second)]
    sizes = {SETS[name].size for name, _, _ in places if name in SETS} - {None}
    if size is None and len(sizes) != 1:
        raise UserError("--size is needed: the two sets do not say by themselves which size they have.")
    channels = 1 if all(name in SETS and SETS[name].channels == 1 for name, _, _ in places) else 3
    found, described = [], []
    for name, path, split in places:
        notes: list[str] = []
        fit = Fit(size or next(iter(sizes)), channels, crop)
        stores = open_stores(name, path, [split] if split else ["train", "test"], fit, skip_bad, watch, notes)
        chosen = split or ("train" if "train" in stores else "test")
        if chosen not in stores:
            raise UserError(f"{path or name} has no split '{chosen}'.")
        what = {"source": name if path is None else path.resolve().name, "split": chosen, "size": fit.size}
        what |= {"channels": channels, "crop": crop, "resize": fit.resize}
        store = stores[chosen]
        if len(store) < 2:
            raise UserError(f"{path or name} has {len(store)} image: a distance needs two or more in each set.")
        found.append(reference(store, what, features, watch=watch)[0].moments)
        described.append({**what, "images": len(store), "checksum": data.fingerprint(store), "notes": notes})
    return features.distance_name, frechet_distance(*found), described


def _place(word: str) -> tuple[str, Path | None, str | None]:
    """A named set and its split, or a place."""
    name, colon, split = word.partition(":")
    if name in SETS:
        if colon and not split:
            raise UserError(f"'{word}' names no split: write {name}:test, or {name} for its training images.")
        return name, None, split or None
    path = Path(word).expanduser()
    if not path.exists():
        raise UserError(
            f"'{word}' is no named set and no place.{nearest(name.lower(), SETS)} See 'dualmcmc data list'."
        )
    return "folder", path, None
