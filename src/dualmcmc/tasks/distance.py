"""FID between any two sets of images."""

from __future__ import annotations

from typing import Any

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_stores
from dualmcmc.data.sets import SETS
from dualmcmc.errors import UserError
from dualmcmc.metrics.features import Features
from dualmcmc.metrics.frechet import Moments, frechet_distance
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.inputs import conversion_notes, parse_set
from dualmcmc.tasks.reference import reference

ENOUGH = 10_000  # images below which FID's bias is worth a remark


def distance(
    first: str,
    second: str,
    features: Features,
    size: int | None = None,
    crop: Crop = "center",
    skip_bad: bool = False,
    watch: Watch = quiet,
) -> tuple[str, float, list[dict[str, Any]]]:
    """Between two sets (`parse_set`): what it may be called, the distance, and what the sets are."""
    places = [parse_set(word) for word in (first, second)]
    sizes = {SETS[name].size for name, _, _ in places if name in SETS} - {None}
    if size is None and len(sizes) != 1:
        raise UserError("--size is needed: the two sets have different sizes, or do not say which.")
    channels = 1 if all(name in SETS and SETS[name].channels == 1 for name, _, _ in places) else 3
    found: list[Moments] = []
    described: list[dict[str, Any]] = []
    for word, (name, path, split) in zip((first, second), places, strict=True):
        notes: list[str] = []
        fit = Fit(size or next(iter(sizes)), channels, crop)
        stores = open_stores(name, path, [split] if split else ["train", "test"], fit, skip_bad, watch, notes)
        chosen = split or ("train" if "train" in stores else "test")
        if chosen not in stores:
            raise UserError(f"{path or name} has no split '{chosen}'.")
        notes += conversion_notes(word, fit)
        what: dict[str, Any] = {
            "source": path.resolve().name if path and name == "folder" else name,
            "split": chosen,
            "size": fit.size,
        }
        what |= {"channels": channels, "crop": crop, "resize": fit.resize}
        store = stores[chosen]
        if len(store) < 2:
            raise UserError(f"{path or name} has {len(store)} image: a distance needs two or more in each set.")
        found.append(reference(store, what, features, watch=watch)[0].moments)
        described.append({**what, "images": len(store), "checksum": data.fingerprint(store), "notes": notes})
    described[0]["notes"] += few_notes(min(one["images"] for one in described))
    return features.distance_name, frechet_distance(*found), described


def few_notes(count: int) -> list[str]:
    """A remark on a Fréchet distance of few images, which is biased upwards, the more the fewer."""
    if count >= ENOUGH:
        return []
    return [f"from as few as {count:,} images the distance is much too high: not to be compared with one of 50,000"]
