"""Reconstructions: inference alone, and inference followed by the z-chain; how good they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dualmcmc.crew import Crew
from dualmcmc.data.store import Store
from dualmcmc.metrics.pixels import psnr, squared_errors, ssim
from dualmcmc.pictures import grid, save_png, side_by_side, to_uint8
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.run import Run, finite

FROM_NOISE = (10, 15, 20, 25, 30)  # steps of the paper's chains that start from noise


class Likeness:
    """How alike images and their counterparts are, on average over images that come in parts."""

    def __init__(self) -> None:
        self._count, self._totals = 0, torch.zeros(3, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Images x and what was made of them, y, both in [-1, 1]."""
        y = finite(y).clamp(-1, 1)  # as a picture of it would be; a chain on x can leave the range
        self._count += len(x)
        self._totals += torch.stack([squared_errors(x, y).sum(), psnr(x, y).sum(), ssim(x, y).sum()]).cpu()

    def join(self, crew: Crew) -> None:
        """Take in what the other processes have."""
        counts, totals = zip(*crew.gather((self._count, self._totals)), strict=True)
        self._count, self._totals = sum(counts), torch.stack(totals).sum(0)

    def numbers(self) -> dict[str, float]:
        """Means over the images; MSE per pixel on both scales in use."""
        mse, decibel, similarity = (self._totals / self._count).tolist()
        return {"mse": mse, "mse_unit": mse / 4, "psnr": decibel, "ssim": similarity}


@dataclass(frozen=True)
class Reconstruction:
    """Numbers over all images; and the first images themselves, as bytes.

    `inference` and `revised` have mse (pixels in [-1, 1]), mse_unit (pixels in [0, 1]), psnr, ssim.
    """

    original: Tensor
    inferred: Tensor
    rebuilt: Tensor
    inference: dict[str, float]
    revised: dict[str, float]
    images: int
    steps: int


def reconstruct(
    run: Run, images: Store, steps: int | None = None, keep: int = 64, watch: Watch = quiet
) -> Reconstruction:
    """Images through I and G, without and with the z-chain; the first `keep` are kept. Memory stays bounded."""
    likeness = (Likeness(), Likeness())
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    run.expect(len(images), watch, z_chain=True)
    for part, x in batches(run, images, watch, "reconstructing"):
        rng = run.stream("z-chain", int(part[0]))
        for kind, length in enumerate((0, steps)):
            y = run.reconstruct(x, length, rng)
            likeness[kind].add(x, y)
            kept[kind].append(to_uint8(y[: max(0, keep - int(part[0]))]).cpu())
    inferred, rebuilt = (torch.cat(pieces) for pieces in kept)
    return Reconstruction(
        original=images.first(keep),
        inferred=inferred,
        rebuilt=rebuilt,
        inference=likeness[0].numbers(),
        revised=likeness[1].numbers(),
        images=len(images),
        steps=run.config.teaching.z_chain.steps if steps is None else steps,
    )


def save_picture(result: Reconstruction, out: Path) -> None:
    """Originals, inference alone, inference + z-chain: three grids in a row."""
    columns = max(1, round(len(result.original) ** 0.5))
    parts = (result.original, result.inferred, result.rebuilt)
    save_png(side_by_side(*(grid(part, columns) for part in parts)), out)


def compare_starts(run: Run, images: Store, watch: Watch = quiet) -> dict[str, dict[str, float]]:
    """The paper's comparison (Fig.ssim): inference alone, inference + L steps, and chains started from noise.

    A chain from noise after 10 steps is the same chain on its way to 30, so one is run and looked at. The processes of
    the run's crew share the images.
    """
    own = run.config.teaching.z_chain.steps
    after = sorted({own, *FROM_NOISE})
    found = {"inference": Likeness(), f"inference+{own}": Likeness()} | {f"noise+{k}": Likeness() for k in after}
    run.expect(len(images), watch, z_chain=True)
    with run.crew.alike():
        for part, x in batches(run, images, watch, "reconstructing", run.crew):
            inferred, from_noise = (run.stream(purpose, int(part[0])) for purpose in ("z-chain", "from noise"))
            z = run.infer(x).mean
            found["inference"].add(x, run.generate(z))
            found[f"inference+{own}"].add(x, run.generate(run.revise_z(z, x, rng=inferred)))
            z, done = run.prior(len(x), from_noise), 0
            for steps in after:
                z, done = run.revise_z(z, x, steps - done, from_noise), steps
                found[f"noise+{steps}"].add(x, run.generate(z))
    for likeness in found.values():
        likeness.join(run.crew)
    return {name: likeness.numbers() for name, likeness in found.items()}
