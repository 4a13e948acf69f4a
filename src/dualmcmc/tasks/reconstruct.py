"""Reconstructions: inference alone, and inference followed by the z-chain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dualmcmc import data
from dualmcmc.data import Images
from dualmcmc.data.files import read_images
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


def held_out(images: Images) -> tuple[Tensor, str]:
    """Bytes to test with, and what they are: held-out images where there are any."""
    return (images.train, "training images") if images.test is None else (images.test, "held-out images")


def images_for(run: Run, path: Path | None) -> tuple[Tensor, str]:
    """A user's images at `path`, brought to the run's size, or the run's own held-out ones."""
    if path is None:
        return held_out(data.load(run.config.data))
    cfg = run.config.data
    return read_images(path, cfg.size, cfg.channels), f"images of {path}"


def reconstruct(run: Run, images: Tensor, steps: int | None = None) -> Reconstruction:
    """Byte images (N, C, H, W) through I and G, without and with the z-chain."""
    x = from_uint8(images).to(run.device)
    inferred = run.reconstruct(x, steps=0)
    revised = run.reconstruct(x, steps)
    return Reconstruction(
        original=images,
        inferred=to_uint8(inferred).cpu(),
        revised=to_uint8(revised).cpu(),
        mse_inference=float((x - inferred).square().mean()),
        mse_revised=float((x - revised).square().mean()),
        steps=run.config.teaching.z_chain.steps if steps is None else steps,
    )


def save_picture(result: Reconstruction, out: Path, n: int = 64) -> None:
    """Originals, inference alone, inference + z-chain: three grids in a row."""
    columns = max(1, round(min(n, len(result.original)) ** 0.5))
    parts = (result.original, result.inferred, result.revised)
    save_png(side_by_side(*(grid(part[:n].cpu(), columns) for part in parts)), out)
