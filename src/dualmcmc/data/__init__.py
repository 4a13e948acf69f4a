"""Images to learn from: one file a source, all as bytes in one tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dualmcmc.config import Data
from dualmcmc.errors import UserError
from dualmcmc.rng import generator

SPLIT_SEED = 20231  # fixed: a run's seed must not change what is held out


class Images(NamedTuple):
    """(N, C, H, W) bytes each; `test` is None where nothing is held out."""

    train: Tensor
    test: Tensor | None

    def held_out(self) -> tuple[Tensor, str]:
        """What to test with, and what it is: held-out images where there are any."""
        return (self.train, "training images") if self.test is None else (self.test, "held-out images")


def load(cfg: Data) -> Images:
    """The images a config asks for."""
    if cfg.source == "digits":
        from dualmcmc.data.digits import digits

        if (cfg.size, cfg.channels) != (8, 1):
            raise UserError(
                "data.source=digits has 8x8 grey images: set data.size=8 and data.channels=1, "
                "or data.source=files with data.path."
            )
        everything, test = digits(), None
    else:
        from dualmcmc.data.files import read_images

        if cfg.path is None:
            raise UserError(
                f"this preset needs images of {cfg.size}x{cfg.size}: give data.path=FOLDER, FILE.zip or FILE.npz."
            )
        everything = read_images(Path(cfg.path).expanduser(), cfg.size, cfg.channels)
        test = read_images(Path(cfg.test_path).expanduser(), cfg.size, cfg.channels) if cfg.test_path else None
    if test is None and cfg.holdout > 0:
        everything, test = _split(everything, cfg.holdout)
    return Images(everything, test)


def fingerprint(images: Tensor) -> str:
    """A short checksum of pixels and their order: what a run must find again when it goes on."""
    digest = hashlib.sha256(str(tuple(images.shape)).encode())
    digest.update(images.cpu().contiguous().numpy().data)
    return digest.hexdigest()[:16]


def _split(images: Tensor, share: float) -> tuple[Tensor, Tensor]:
    held_out = round(share * len(images))
    if not 0 < held_out < len(images):
        raise UserError(f"data.holdout={share:g} of {len(images)} images leaves nothing to train on or to test with.")
    order = torch.randperm(len(images), generator=generator(SPLIT_SEED))
    return images[order[held_out:]], images[order[:held_out]]
