"""Images to learn from: one file a source, all as bytes of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualmcmc.config import Data
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_sources, open_stores
from dualmcmc.data.store import Joined, Store, Subset
from dualmcmc.errors import UserError, nearest
from dualmcmc.progress import Watch, quiet
from dualmcmc.rng import generator

SPLIT_SEED = 20231  # fixed: a run's seed must not change what is held out


class Images(NamedTuple):
    """What to train on, and what is held out: None where nothing is."""

    train: Store
    test: Store | None
    notes: tuple[str, ...] = ()  # what a person should know: images left out, a set that is here in part

    def held_out(self) -> tuple[Store, str]:
        """What to test with, and what it is: held-out images where there are any."""
        return (self.train, "training images") if self.test is None else (self.test, "held-out images")


def load(cfg: Data, watch: Watch = quiet) -> Images:
    """The images a config asks for."""
    fit, path = Fit.of(cfg), None if cfg.path is None else Path(cfg.path).expanduser()
    names = cfg.split.split("+")
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"data.split={cfg.split} has an empty part or the same one twice: write train, or train+extra.")
    notes: list[str] = []
    found = open_stores(cfg.source, path, [*names, "test"], fit, cfg.skip_bad, watch, notes)
    for name in names:
        if name not in found:
            here = open_sources(cfg.source, path)
            raise UserError(
                f"data.split={cfg.split}: {cfg.source} has no split '{name}' there, only {', '.join(here)}."
                f"{nearest(name, here)}"
            )
    train = found[names[0]] if len(names) == 1 else Joined([found[name] for name in names])
    test = found["test"] if "test" in found and "test" not in names else None
    if cfg.test_path is not None:
        test = open_images(Path(cfg.test_path).expanduser(), fit, cfg.skip_bad, watch, notes)
    elif cfg.holdout > 0:
        if test is not None:
            raise UserError(
                f"data.holdout={cfg.holdout:g}, but {cfg.source} has a test split of its own: use data.holdout=0."
            )
        train, test = _hold_out(train, cfg.holdout)
    return Images(train, test, tuple(notes))


def open_images(
    path: Path, fit: Fit, skip_bad: bool = False, watch: Watch = quiet, notes: list[str] | None = None
) -> Store:
    """A user's own images to test with: of a packed file its test split, else all that is there."""
    found = open_stores("folder", path, ("test", "train"), fit, skip_bad, watch, notes)
    if not found:
        raise UserError(f"'{path}' has neither a train nor a test split.")
    return found.get("test") or found["train"]


def describe(cfg: Data, images: Images) -> dict[str, Any]:
    """What was learned from, to be kept with every number: set, split, crop, size, checksum."""
    settings = ("source", "split", "holdout", "size", "channels", "crop", "resize", "flip")
    return {
        **{name: getattr(cfg, name) for name in settings},
        "images": len(images.train),
        "checksum": fingerprint(images.train),
        "test_images": 0 if images.test is None else len(images.test),
        "test_checksum": None if images.test is None else fingerprint(images.test),
        "notes": list(images.notes),
    }


def fingerprint(images: Store) -> str:
    """A short checksum of pixels and their order: what a run must find again when it goes on."""
    return images.checksum[:16]


def _hold_out(images: Store, share: float) -> tuple[Store, Store]:
    held_out = round(share * len(images))
    if not 0 < held_out < len(images):
        raise UserError(f"data.holdout={share:g} of {len(images)} images leaves nothing to train on or to test with.")
    order = torch.randperm(len(images), generator=generator(SPLIT_SEED)).numpy()
    return Subset(images, order[held_out:]), Subset(images, order[:held_out])
