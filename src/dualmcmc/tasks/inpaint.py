"""Inpainting in the paper's three stages (sec. Image Inpainting), and its masks.

1. inference: I sees the image with its hidden pixels at mid-grey, G generates the reconstruction;
2. + z-chain: Langevin steps on p(z | observed pixels) from there;
3. + x-chain: Langevin steps on the energy from there.

Without an inference model the first stage is a prior draw; without an energy there are two stages.

Each stage is measured in two ways. `completed`: observed pixels are kept and only hidden ones come from the model; the
x-chain runs on the hidden pixels given the observed. `generated`: all pixels come from the generator, and the x-chain
runs on all of them. The paper's numbers appear to be of this kind, since they hardly depend on the mask.
`psnr_hidden_db` of `completed` is over the hidden pixels of all images together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.config import Chain
from dualmcmc.data.images import ImageSpec, UnreadableImage, decode
from dualmcmc.metrics.pixels import psnr_of_mse
from dualmcmc.tasks.convert import as_store
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.reconstruct import Similarity, start_name
from dualmcmc.tasks.run import Run
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.images import grid, side_by_side, to_uint8
from dualmcmc.utils.progress import ProgressFactory, show_progress
from dualmcmc.utils.tree import Tree

STAGES = ("inference", "z_chain", "x_chain")
FILL = 0.0  # hidden pixels as I sees them, in [-1, 1]
MASKS = ("M20", "M30", "M40", "R20", "R30", "R40")
PAPER_SIZE = 64  # the image size at which M20 hides 20x20 pixels
BLOCKS_PER_SIDE = 8  # a random block has 1/8 of the image's side


@dataclass(frozen=True)
class Inpainting(Tree):
    """Similarity at each stage over all images, and the first images as uint8."""

    original: Tensor
    occluded: Tensor
    stages: list[Tensor]  # completed images, one (keep, C, H, W) per stage
    generated: dict[str, dict[str, float]]
    completed: dict[str, dict[str, float]]
    images: int
    hidden_fraction: float  # of the pixels
    z_chain: Chain
    x_chain: Chain
    start: str = "inference"  # or "prior draw"

    def labels(self) -> dict[str, str]:
        """What each stage is called."""
        chains = (f"+ {name}-chain ({c.format_steps()})" for name, c in (("z", self.z_chain), ("x", self.x_chain)))
        labels = dict(zip(STAGES, (self.start, *chains), strict=True))
        return {stage: labels[stage] for stage in self.completed}


def complete(
    run: Run,
    x: Tensor,
    observed: Tensor,
    rng: torch.Generator | None = None,
    temperature: float | None = 0.0,
) -> list[tuple[Tensor, Tensor]]:
    """(completed, generated) after each stage, for images x (B, C, H, W) and a boolean mask `observed` (B, 1, H, W).

    Hidden pixels of x are not used. `temperature` is that of the z-chain, see `inpaint`.
    """
    x, observed = x.to(run.device), observed.to(run.device)
    occluded = torch.where(observed, x, FILL)
    z = run.initial_latents(occluded, rng)
    first = run.generate(z)
    second = run.generate(run.revise_z(z, occluded, rng=rng, observed=observed, temperature=temperature))
    stages = [(torch.where(observed, occluded, generated), generated) for generated in (first, second)]
    if not run.has("energy"):
        return stages
    completed, generated = stages[-1]
    return [*stages, (run.revise_x(completed, rng=rng, observed=observed), run.revise_x(generated, rng=rng))]


def steps_per_image(run: Run) -> int:
    """The work of inpainting an image: the steps of the z-chain and of two x-chains, and one for the rest."""
    x_chains = 2 * run.config.sampling_chain.steps if run.has("energy") else 0
    return run.config.teaching.z_chain.steps + x_chains + 1


def _stages(run: Run) -> tuple[str, ...]:
    return STAGES if run.has("energy") else STAGES[:2]


def inpaint(
    run: Run,
    images: Any,
    mask: str,
    keep: int = 12,
    progress: ProgressFactory = show_progress,
    temperature: float | None = 0.0,
) -> Inpainting:
    """Hide part of each image and fill it in, in bounded memory; the result includes the first `keep` images.

    `images`: an `ImageStore`, or what `Run` takes. `temperature` of the z-chain: 0 is noise-free, 1 the paper's, None
    the run's setting.
    """
    run.require_images("inpainting")
    run.require("generator", "inpainting")
    images, size = as_store(images, run.config.data), _side(run)
    generated, completed = ({stage: Similarity() for stage in _stages(run)} for _ in range(2))
    kept: list[list[Tensor]] = [[] for _ in range(len(completed) + 1)]
    hidden, rng = 0.0, run.generator_for("inpaint")
    squared_error = dict.fromkeys(completed, 0.0)  # of hidden pixels; the observed ones are exact
    for z_chain in (True, False):
        run.prepare(len(images), progress, z_chain)
    for indices, x in batches(run, images, progress, "inpainting", steps_per_image(run)):
        first = int(indices[0])
        observed = make_mask(mask, len(x), size, run.seed, first).to(run.device)
        hidden += float((~observed).double().mean((1, 2, 3)).sum())
        shown = max(0, keep - first)
        kept[0].append(to_uint8(torch.where(observed, x, FILL)[:shown]).cpu())
        results = complete(run, x, observed, rng, temperature)
        for number, (stage, (filled, made)) in enumerate(zip(completed, results, strict=True), 1):
            generated[stage].add(x, made)
            completed[stage].add(x, filled)
            squared_error[stage] += float((x - filled.clamp(-1, 1)).double().square().sum())
            kept[number].append(to_uint8(filled[:shown]).cpu())
    occluded, *stages = (torch.cat(parts) for parts in kept)
    hidden_values = hidden * x[0].numel()
    return Inpainting(
        images.first(keep),
        occluded,
        stages,
        {stage: similarity.numbers() for stage, similarity in generated.items()},
        {
            stage: similarity.numbers() | {"psnr_hidden_db": psnr_of_mse(squared_error[stage] / hidden_values)}
            for stage, similarity in completed.items()
        },
        len(images),
        hidden / len(images),
        run.z_chain_settings(temperature=temperature),
        run.config.sampling_chain,
        start_name(run),
    )


def _side(run: Run) -> int:
    """The side of the run's images."""
    _, height, width = run.config.data.sample_shape
    if height != width:
        raise UserError(f"masks are for square images, and this run was trained on {width}x{height} ones.")
    return height


def picture(result: Inpainting) -> Tensor:
    """One row per image; columns: image, masked image, the three stages."""
    columns = (result.original, result.occluded, *result.stages)
    captions = ("image", "masked", *result.labels().values())
    return side_by_side(*(grid(images, 1) for images in columns), captions=captions, gap=8)


def make_mask(mask: str, count: int, size: int, seed: int = 0, first: int = 0) -> Tensor:
    """(count, 1, size, size), true for observed pixels, of the images with indices `first`, `first` + 1, ...

    M20, M30, M40: a central square of that side at 64x64, scaled to other sizes. R20, R30, R40: randomly placed squares
    that hide 20, 30 or 40 % of the pixels, different for each image, determined by the seed. Other numbers work too. Or
    the path of an image whose white pixels (128 or more) are hidden.
    """
    named = re.fullmatch(r"([MR])(\d{1,2})", mask.upper())
    if named is None:
        return _mask_from_file(expand_user(mask), size).expand(count, 1, size, size)
    number = int(named[2])
    if named[1] == "M":
        if not 0 < number < PAPER_SIZE:
            raise UserError(f"--mask {mask}: the side of the square must be 1 to {PAPER_SIZE - 1} (of 64 pixels).")
        side = min(max(1, round(number / PAPER_SIZE * size)), size - 1)  # hides something, but not everything
        top = (size - side) // 2
        observed = torch.ones(1, 1, size, size, dtype=torch.bool)
        observed[..., top : top + side, top : top + side] = False
        return observed.expand(count, 1, size, size)
    if number < 1:
        raise UserError(f"--mask {mask}: the percentage of hidden pixels must be 1 to 99.")
    return torch.stack([_random_blocks(number / 100, size, seed, first + index) for index in range(count)])


def _random_blocks(fraction: float, size: int, seed: int, index: int) -> Tensor:
    """Blocks until the fraction is hidden; the last one is cut to hide exactly that."""
    source = np.random.default_rng(rng.derive_seed(seed, rng.Stream.MASKS, index))
    side, wanted = max(1, round(size / BLOCKS_PER_SIDE)), round(fraction * size * size)
    hidden = np.zeros((size, size), bool)
    while (missing := wanted - hidden.sum()) > 0:
        top, left = source.integers(0, size - side + 1, 2)
        block = hidden[top : top + side, left : left + side]
        new = np.flatnonzero(~block)[:missing]
        block[np.unravel_index(new, block.shape)] = True
    return torch.from_numpy(~hidden)[None]


def _mask_from_file(path: Path, size: int) -> Tensor:
    if not path.is_file():
        raise UserError(
            f"--mask {path}: not an existing file. Use {', '.join(MASKS)}, or an image whose white pixels are hidden."
        )
    try:
        content = path.read_bytes()
        height, width, _ = decode(content, ImageSpec()).shape
        if height != width:
            raise UnreadableImage(f"it is {width}x{height}, but must be square")
        pixels = decode(content, ImageSpec(size, 1, "none", "box"))
    except (OSError, UnreadableImage) as error:
        raise UserError(f"--mask {path} cannot be used: {error}.") from None
    observed = torch.from_numpy(pixels[..., 0] < 128)
    if observed.all() or not observed.any():
        what = "nothing" if observed.all() else "everything"
        raise UserError(f"--mask {path} hides {what}: white pixels are hidden, black ones observed.")
    return observed[None, None]
