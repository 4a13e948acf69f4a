"""Filling in what is hidden, in the paper's three stages (sec. Image Inpainting).

1. inference + generator: I sees the occluded image, the hidden pixels at mid-grey; G gives the recovery.
2. + z-chain: Langevin steps on p(z | observed pixels) from there.
3. + x-chain: Langevin steps on the energy from there.

Each stage is measured in two ways. `completed`: the observed pixels stay, exactly, and only the hidden
ones come from the model; the x-chain runs on these, given the observed. `generated`: the image is all the
generator's, and the x-chain runs on all of it; the paper's figures are of that kind, as far as we can tell:
they hardly depend on how much is hidden. `psnr_hidden`, with the completed ones, is of the hidden pixels of all
images together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dualmcmc.data.store import Store
from dualmcmc.pictures import grid, side_by_side, to_uint8
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.masks import observed
from dualmcmc.tasks.reconstruct import Likeness
from dualmcmc.tasks.run import Run

STAGES = ("inference", "z_chain", "x_chain")
FILL = 0.0  # what a hidden pixel looks like to I, in [-1, 1]


@dataclass(frozen=True)
class Inpainting:
    """Numbers of each stage over all images; and the first images as bytes."""

    original: Tensor
    occluded: Tensor
    stages: list[Tensor]  # completed, one (keep, C, H, W) a stage
    generated: dict[str, dict[str, float]]
    completed: dict[str, dict[str, float]]
    images: int
    hidden: float  # share of the pixels


def complete(run: Run, x: Tensor, seen: Tensor, rng: torch.Generator | None = None) -> list[tuple[Tensor, Tensor]]:
    """(completed, generated) after each of the three stages, for images x (B, C, H, W), seen (B, 1, H, W).

    Only the pixels that are seen are used.
    """
    x, seen = x.to(run.device), seen.to(run.device)
    occluded = torch.where(seen, x, FILL)
    z = run.infer(occluded).mean
    first = run.generate(z)
    second = run.generate(run.revise_z(z, occluded, rng=rng, observed=seen))
    stages = [(torch.where(seen, occluded, made), made) for made in (first, second)]
    completed, made = stages[-1]
    return [*stages, (run.revise_x(completed, rng=rng, observed=seen), run.revise_x(made, rng=rng))]


def inpaint(run: Run, images: Store, mask: str, keep: int = 12, watch: Watch = quiet) -> Inpainting:
    """Hide a part of each image and fill it in; the first `keep` are kept. Memory stays bounded."""
    generated, completed = ({stage: Likeness() for stage in STAGES} for _ in range(2))
    kept: list[list[Tensor]] = [[] for _ in range(len(STAGES) + 1)]
    hidden, rng = 0.0, run.stream("inpaint")
    errors = dict.fromkeys(STAGES, 0.0)  # squared, of the hidden pixels alone
    run.expect(len(images), watch, z_chain=True)
    for part, x in batches(run, images, watch, "inpainting"):
        seen = observed(mask, len(x), run.config.data.size, run.seed, int(part[0])).to(run.device)
        hidden += float((~seen).double().mean((1, 2, 3)).sum())
        shown = max(0, keep - int(part[0]))
        kept[0].append(_bytes(torch.where(seen, x, FILL)[:shown]))
        for number, (stage, (filled, made)) in enumerate(zip(STAGES, complete(run, x, seen, rng), strict=True), 1):
            generated[stage].add(x, made)
            completed[stage].add(x, filled)
            errors[stage] += float((x - filled.clamp(-1, 1)).double().square().sum())
            kept[number].append(_bytes(filled[:shown]))
    occluded, *stages = (torch.cat(parts) for parts in kept)
    return Inpainting(
        images.first(keep),
        occluded,
        stages,
        {stage: likeness.numbers() for stage, likeness in generated.items()},
        {
            stage: likeness.numbers() | {"psnr_hidden": _decibel(errors[stage] / (hidden * x[0].numel()))}
            for stage, likeness in completed.items()
        },
        len(images),
        hidden / len(images),
    )


def picture(result: Inpainting) -> Tensor:
    """Columns: test image, occluded, and the three stages; one row an image."""
    columns = (result.original, result.occluded, *result.stages)
    return side_by_side(*(grid(images, 1) for images in columns), gap=8)


def _decibel(mse: float) -> float:
    """PSNR of a mean squared error of pixels in [-1, 1]."""
    return 10 * math.log10(4 / mse) if mse > 0 else math.inf


def _bytes(x: Tensor) -> Tensor:
    return to_uint8(x).cpu()
