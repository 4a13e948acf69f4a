"""Reconstructions: inference alone, and inference followed by the z-chain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.data.images import Fit
from dualmcmc.data.store import Store
from dualmcmc.pictures import from_uint8, grid, save_png, side_by_side, to_uint8
from dualmcmc.tasks.run import Run


@dataclass(frozen=True)
class Reconstruction:
    """Mean squared errors per pixel over all images, pixels in [-1, 1]; and the first images themselves, as bytes."""

    original: Tensor
    inferred: Tensor
    revised: Tensor
    mse_inference: float
    mse_revised: float
    images: int
    steps: int


def images_for(
    run: Run, path: Path | None, crop: Crop | None = None, skip_bad: bool = False
) -> tuple[Store, str, dict[str, Any]]:
    """A user's images at `path`, brought to the run's size, or the run's own held-out ones.

    Also what they are, in words and for the record. `crop`: another than the run's, for images at `path`.
    """
    cfg = run.config.data
    if path is None:
        own = data.load(cfg)
        return *own.held_out(), data.describe(cfg, own)
    fit = replace(Fit.of(cfg), crop=crop or cfg.crop)
    notes: list[str] = []
    images = data.open_images(path, fit, skip_bad, notes=notes)
    return images, f"images of {path}", {"path": str(path), **vars(fit), "notes": notes}


def reconstruct(run: Run, images: Store, steps: int | None = None, keep: int = 64) -> Reconstruction:
    """Images through I and G, without and with the z-chain; the first `keep` are kept. Memory stays bounded."""
    errors = [0.0, 0.0]
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    parts = np.array_split(np.arange(len(images)), max(1, -(-len(images) // run.config.sampling.batch)))
    for part in parts:
        x = from_uint8(images.take(part).to(run.device))
        for kind, length in enumerate((0, steps)):
            y = run.reconstruct(x, length)
            errors[kind] += float((x - y).square().sum())
            wanted = max(0, keep - int(part[0]))
            kept[kind].append(to_uint8(y[:wanted]).cpu())
    inferred, revised = (torch.cat(pieces) for pieces in kept)
    return Reconstruction(
        original=images.first(keep),
        inferred=inferred,
        revised=revised,
        mse_inference=errors[0] / images.nbytes,
        mse_revised=errors[1] / images.nbytes,
        images=len(images),
        steps=run.config.teaching.z_chain.steps if steps is None else steps,
    )


def save_picture(result: Reconstruction, out: Path) -> None:
    """Originals, inference alone, inference + z-chain: three grids in a row."""
    columns = max(1, round(len(result.original) ** 0.5))
    parts = (result.original, result.inferred, result.revised)
    save_png(side_by_side(*(grid(part, columns) for part in parts)), out)
