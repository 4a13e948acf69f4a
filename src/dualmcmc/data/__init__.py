"""Training and test images. `load` returns the splits that a config selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualmcmc.config import Data
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import open_sources, open_stores
from dualmcmc.data.store import ConcatStore, ImageStore, SubsetStore
from dualmcmc.rng import make_generator
from dualmcmc.utils.errors import UserError, nearest
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.progress import ProgressFactory, no_progress

HOLDOUT_SEED = 20231  # fixed: the seed of a run must not change which images are held out


class DataSplits(NamedTuple):
    """Training images, and test images if there are any."""

    train: ImageStore
    test: ImageStore | None
    notes: tuple[str, ...] = ()  # skipped images, incomplete datasets

    def test_or_train(self) -> tuple[ImageStore, str]:
        """The test images, or the training images if there are none, and a name for them."""
        return (self.train, "training images") if self.test is None else (self.test, "held-out images")


def load(cfg: Data, progress: ProgressFactory = no_progress) -> DataSplits:
    """The images of a config."""
    if cfg.source == "custom":
        raise UserError(
            "data.source=custom: pass the data in Python, as data=... (again, if the run was trained on them), or "
            "choose other data."
        )
    spec, path = ImageSpec.from_config(cfg), None if cfg.path is None else expand_user(cfg.path)
    names = cfg.split.split("+")
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"data.split={cfg.split}: a split is empty or repeated. Use train, or train+extra.")
    notes: list[str] = []
    stores = open_stores(cfg.source, path, [*names, "test"], spec, cfg.skip_bad, progress, notes)
    for name in names:
        if name not in stores:
            known = open_sources(cfg.source, path)
            raise UserError(
                f"data.split={cfg.split}: {cfg.source} has no split '{name}', only {', '.join(known)}."
                f"{nearest(name, known)}"
            )
    train = stores[names[0]] if len(names) == 1 else ConcatStore([stores[name] for name in names])
    test = stores["test"] if "test" in stores and "test" not in names else None
    if cfg.test_path is not None:
        test = open_images(expand_user(cfg.test_path), spec, cfg.skip_bad, progress, notes)
    elif cfg.holdout > 0:
        if test is not None:
            raise UserError(f"data.holdout={cfg.holdout:g}, but {cfg.source} has a test split: use data.holdout=0.")
        train, test = hold_out(train, cfg.holdout)
    return DataSplits(train, test, tuple(notes))


def open_images(
    path: Path,
    spec: ImageSpec,
    skip_bad: bool = False,
    progress: ProgressFactory = no_progress,
    notes: list[str] | None = None,
) -> ImageStore:
    """The images at `path`; of a packed file, its test split if it has one."""
    stores = open_stores("folder", path, ("test", "train"), spec, skip_bad, progress, notes)
    if not stores:
        raise UserError(f"'{path}' has neither a train nor a test split.")
    return stores.get("test") or stores["train"]


def describe(cfg: Data, images: DataSplits) -> dict[str, Any]:
    """The dataset, split, crop, size and checksums, to be recorded with every result."""
    return {
        **describe_settings(cfg),
        "images": len(images.train),
        "checksum": fingerprint(images.train),
        "test_images": 0 if images.test is None else len(images.test),
        "test_checksum": None if images.test is None else fingerprint(images.test),
        "notes": list(images.notes),
    }


def describe_settings(cfg: Data) -> dict[str, Any]:
    """The same as far as it is known without the images."""
    if cfg.shape is not None:
        return {"source": cfg.source, "holdout": cfg.holdout, "shape": list(cfg.shape)}
    settings = ("source", "split", "holdout", "size", "channels", "crop", "resize", "flip")
    return {name: getattr(cfg, name) for name in settings}


def fingerprint(images: ImageStore) -> str:
    """A short checksum of the pixels and their order; a resumed run compares it."""
    return shorten(images.checksum)


def shorten(checksum: str) -> str:
    """A checksum as it is recorded."""
    return checksum[:16]


def hold_out(images: ImageStore, fraction: float) -> tuple[ImageStore, ImageStore]:
    """Two stores: without this fraction of the images, chosen at random, and these alone."""
    count = round(fraction * len(images))
    if not 0 < count < len(images):
        raise UserError(f"data.holdout={fraction:g} of {len(images)} images leaves no training or no test images.")
    order = torch.randperm(len(images), generator=make_generator(HOLDOUT_SEED)).numpy()
    return SubsetStore(images, order[count:]), SubsetStore(images, order[:count])
