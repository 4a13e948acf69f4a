"""Reconstructions: inference alone, and inference followed by the z-chain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.data.images import Fit
from dualmcmc.pictures import from_uint8, grid, save_png, side_by_side, to_uint8
from dualmcmc.tasks.run import Run


@dataclass(frozen=True)
class Reconstruction:
    """Images (bytes) and mean squared errors per pixel, pixels in [-1, 1]."""

    original: Tensor
    inferred: Tensor
    revised: Tensor
    mse_inference: float
    mse_revised: float
    steps: int


def images_for(run: Run, path: Path | None, crop: Crop | None = None) -> tuple[Tensor, str, dict[str, Any]]:
    """A user's images at `path`, brought to the run's size, or the run's own held-out ones.

    Also what they are, in words and for the record. `crop`: another than the run's, for images at `path`.
    """
    cfg = run.config.data
    if path is None:
        images = data.load(cfg)
        held_out, what = images.held_out()
        return held_out.tensor(), what, data.describe(cfg, images)
    fit = replace(Fit.of(cfg), crop=crop or cfg.crop)
    return data.read_images(path, fit), f"images of {path}", {"path": str(path), **vars(fit)}


def reconstruct(run: Run, images: Tensor, steps: int | None = None) -> Reconstruction:
    """Byte images (N, C, H, W) through I and G, without and with the z-chain; memory stays bounded."""
    errors = [0.0, 0.0]
    rebuilt: tuple[list[Tensor], list[Tensor]] = ([], [])
    parts = max(1, -(-len(images) // run.config.sampling.batch))
    for part in images.tensor_split(parts):
        x = from_uint8(part.to(run.device))
        for kind, length in enumerate((0, steps)):
            y = run.reconstruct(x, length)
            errors[kind] += float((x - y).square().sum())
            rebuilt[kind].append(to_uint8(y).cpu())
    inferred, revised = (torch.cat(pieces) for pieces in rebuilt)
    return Reconstruction(
        original=images,
        inferred=inferred,
        revised=revised,
        mse_inference=errors[0] / images.numel(),
        mse_revised=errors[1] / images.numel(),
        steps=run.config.teaching.z_chain.steps if steps is None else steps,
    )


def save_picture(result: Reconstruction, out: Path, n: int = 64) -> None:
    """Originals, inference alone, inference + z-chain: three grids in a row."""
    columns = max(1, round(min(n, len(result.original)) ** 0.5))
    parts = (result.original, result.inferred, result.revised)
    save_png(side_by_side(*(grid(part[:n].cpu(), columns) for part in parts)), out)
