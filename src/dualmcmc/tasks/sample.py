"""Generator samples and their EBM-revised forms, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from dualmcmc.errors import UserError
from dualmcmc.files import atomic, check_target
from dualmcmc.pictures import before_and_after, save_png, to_uint8
from dualmcmc.tasks.run import Run

MOST_IN_A_PICTURE = 10_000


def sample(run: Run, n: int, steps: int | None, out: Path) -> dict[str, float]:
    """Draw n samples and write them to `out`; returns mean energies and how far the chain moved.

    .png: generator samples left, revised right. .npz: bytes, (N, H, W, C), as `generator` and `revised`.
    """
    check_target(out, ".png", ".npz")
    if n < 1:
        raise UserError(f"-n must be at least 1, not {n}.")
    if n > MOST_IN_A_PICTURE and out.suffix.lower() == ".png":
        raise UserError(f"-n {n} is too many for a picture (at most {MOST_IN_A_PICTURE}): use --out FILE.npz.")
    start = run.sample(n, steps=0)
    revised = run.revise_x(start, steps)
    if out.suffix.lower() == ".npz":
        with atomic(out) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, generator=_pixels(start), revised=_pixels(revised))
    else:
        columns = max(1, round(n**0.5))
        save_png(before_and_after(start, revised, columns), out)
    return {
        "energy_generator": float(run.energy(start).mean()),
        "energy_revised": float(run.energy(revised).mean()),
        "x_moved": float((revised - start).square().mean().sqrt()),
        "steps": run.config.sampling_chain.steps if steps is None else steps,
    }


def _pixels(images: Tensor) -> np.ndarray:
    return to_uint8(images).permute(0, 2, 3, 1).cpu().numpy()
