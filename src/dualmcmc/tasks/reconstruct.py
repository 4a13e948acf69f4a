"""Reconstruction by inference alone and by inference + z-chain, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualmcmc.config import Chain
from dualmcmc.data.store import ImageStore
from dualmcmc.engine.distributed import World
from dualmcmc.metrics.pixels import MAX_PSNR, mse, psnr, psnr_of_mse, ssim
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.utils.images import grid, save_png, side_by_side, to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress
from dualmcmc.utils.tree import Tree

NOISE_STEPS = (10, 15, 20, 25, 30)  # lengths of the paper's z-chains from noise


class Similarity:
    """MSE, PSNR and SSIM of pairs of images, accumulated batch by batch; of other samples, MSE alone."""

    def __init__(self, of_images: bool = True) -> None:
        self._of_images = of_images
        self._count, self._totals = 0, torch.zeros(3 if of_images else 1, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add samples x and their reconstructions y; images are in [-1, 1]."""
        y = require_finite(y)
        self._count += len(x)
        if not self._of_images:
            self._totals += mse(x, y).sum().cpu()
            return
        y = y.clamp(-1, 1)  # as in a picture; an x-chain can leave the range
        self._totals += torch.stack([mse(x, y).sum(), psnr(x, y).clamp(max=MAX_PSNR).sum(), ssim(x, y).sum()]).cpu()

    def all_reduce(self, world: World) -> None:
        """Combine the sums of all processes."""
        counts, totals = zip(*world.all_gather((self._count, self._totals)), strict=True)
        self._count, self._totals = sum(counts), torch.stack(totals).sum(0)

    def numbers(self) -> dict[str, float]:
        """Means over the images; MSE of pixels in [-1, 1] and in [0, 1]; the PSNR of the mean MSE."""
        if not self._of_images:
            return {"mse": float(self._totals / self._count)}
        mean_mse, mean_psnr, mean_ssim = (self._totals / self._count).tolist()
        return {
            "mse": mean_mse,
            "mse_0_to_1": mean_mse / 4,
            "psnr_db": mean_psnr,
            "psnr_of_mean_mse_db": psnr_of_mse(mean_mse),
            "ssim": mean_ssim,
        }


def steps_per_image(run: Run, steps: int | None = None) -> int:
    """The work of reconstructing an image: the steps of the z-chain, and one for the rest."""
    return (run.config.teaching.z_chain.steps if steps is None else steps) + 1


@dataclass(frozen=True)
class Reconstruction(Tree):
    """Similarity (see `Similarity.numbers`) over all images, and the first of them as uint8."""

    original: Tensor
    inferred: Tensor
    rebuilt: Tensor
    inference: dict[str, float]
    revised: dict[str, float]
    images: int
    z_chain: Chain
    start: str = "inference"  # or "prior draw"

    def captions(self) -> tuple[str, str, str]:
        """What the picture shows, from left to right."""
        return "image", self.start, f"{self.start} + z-chain ({self.z_chain.format_steps()})"


def reconstruct(
    run: Run,
    images: ImageStore,
    steps: int | None = None,
    keep: int = 64,
    progress: ProgressFactory = no_progress,
    temperature: float | None = 0.0,
) -> Reconstruction:
    """Reconstruct images without and with the z-chain, in bounded memory; the result includes the first `keep`.

    `temperature` of the z-chain: 0 is noise-free, 1 the paper's, None the run's setting.
    """
    run.require_images("'reconstruct'")
    run.require("generator", "'reconstruct'")
    similarity = (Similarity(), Similarity())
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    run.prepare(len(images), progress, z_chain=True)
    for indices, x in batches(run, images, progress, "reconstructing", steps_per_image(run, steps)):
        first = int(indices[0])
        rng = run.generator_for("z-chain", first)
        for kind, length in enumerate((0, steps)):
            y = run.reconstruct(x, length, rng, temperature)
            similarity[kind].add(x, y)
            kept[kind].append(to_uint8(y[: max(0, keep - first)]).cpu())
    inferred, rebuilt = (torch.cat(parts) for parts in kept)
    return Reconstruction(
        original=images.first(keep),
        inferred=inferred,
        rebuilt=rebuilt,
        inference=similarity[0].numbers(),
        revised=similarity[1].numbers(),
        images=len(images),
        z_chain=run.z_chain_settings(steps, temperature),
        start=start_name(run),
    )


def start_name(run: Run) -> str:
    """Where the z-chain of an image starts."""
    return "inference" if run.has("inference") else "prior draw"


def save_picture(result: Reconstruction, out: Path) -> None:
    """Three grids next to each other: images, inference alone, inference + z-chain."""
    columns = max(1, round(len(result.original) ** 0.5))
    parts = (result.original, result.inferred, result.rebuilt)
    save_png(side_by_side(*(grid(part, columns) for part in parts), captions=result.captions()), out)


def comparison_steps(run: Run, from_noise: bool = True) -> int:
    """The work per image of `compare_starts`."""
    from_noise = from_noise or not run.has("inference")
    chains = len(_chains_from_inference(run)) * run.config.teaching.z_chain.steps
    return chains + (max(_lengths_from_noise(run)) if from_noise else 0) + 1


def _chains_from_inference(run: Run) -> dict[str, float]:
    """The temperature of each z-chain from inference."""
    chain = run.config.teaching.z_chain
    name = f"inference+{chain.steps}"
    if not run.has("inference"):
        return {}
    return {name: chain.temperature} | ({f"{name} noise-free": 0.0} if chain.temperature > 0 else {})


def _lengths_from_noise(run: Run) -> list[int]:
    return sorted({run.config.teaching.z_chain.steps, *NOISE_STEPS})


def compare_starts(
    run: Run, images: ImageStore, progress: ProgressFactory = no_progress, from_noise: bool = True
) -> dict[str, dict[str, float]]:
    """The paper's comparison (its figure on SSIM): inference, inference + z-chain, and z-chains from noise.

    The z-chain from inference is also run without noise (temperature 0), which finds a mode of p(z|x) instead of a
    sample. Without an inference model all start from noise. One chain from noise is run and evaluated after each of the
    lengths. The processes share the images.
    """
    from_noise = from_noise or not run.has("inference")
    temperatures, lengths = _chains_from_inference(run), _lengths_from_noise(run) if from_noise else []
    names = (
        *(["inference"] if run.has("inference") else []),
        *temperatures,
        *(f"noise+{length}" for length in lengths),
    )
    similarity = {name: Similarity(run.config.data.is_image) for name in names}
    run.prepare(len(images), progress, z_chain=True)
    with run.world.fail_together():
        steps = comparison_steps(run, from_noise)
        for indices, x in batches(run, images, progress, "reconstructing", steps, run.world):
            first = int(indices[0])
            if run.has("inference"):
                inferred = run.infer(x).mean
                similarity["inference"].add(x, run.generate(inferred))
            for name, temperature in temperatures.items():
                z = run.revise_z(inferred, x, rng=run.generator_for("z-chain", first), temperature=temperature)
                similarity[name].add(x, run.generate(z))
            noise = run.generator_for("from noise", first)
            z, done = run.prior(len(x), noise), 0
            for length in lengths:
                z, done = run.revise_z(z, x, length - done, noise), length
                similarity[f"noise+{length}"].add(x, run.generate(z))
    for one in similarity.values():
        one.all_reduce(run.world)
    return {name: one.numbers() for name, one in similarity.items()}
