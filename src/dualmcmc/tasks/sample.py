"""Generator samples and their EBM-revised forms, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualmcmc.errors import UserError
from dualmcmc.files import atomic
from dualmcmc.pictures import grid, save_png, side_by_side, to_uint8
from dualmcmc.tasks.run import Run


def sample(run: Run, n: int, steps: int | None, out: Path) -> dict[str, float]:
    """Draw n samples and write them to `out`; returns mean energies and how far the chain moved.

    .png: generator samples left, revised right. .npz: bytes, (N, H, W, C), as `generator` and `revised`.
    """
    check_ending(out)
    if n < 1:
        raise UserError(f"-n must be at least 1, not {n}.")
    start = run.sample(n, steps=0)
    revised = run.revise_x(start, steps)
    before, after = to_uint8(start).cpu(), to_uint8(revised).cpu()
    if out.suffix == ".npz":
        with atomic(out) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(
                file, generator=before.permute(0, 2, 3, 1).numpy(), revised=after.permute(0, 2, 3, 1).numpy()
            )
    else:
        columns = max(1, round(n**0.5))
        save_png(side_by_side(grid(before, columns), grid(after, columns)), out)
    return {
        "energy_generator": float(run.energy(start).mean()),
        "energy_revised": float(run.energy(revised).mean()),
        "x_moved": float((revised - start).square().mean().sqrt()),
        "steps": run.config.sampling_chain.steps if steps is None else steps,
    }


def check_ending(out: Path) -> None:
    """Only what can be written, into a folder that is there."""
    if out.suffix not in (".png", ".npz"):
        raise UserError(f"--out '{out}' must end in .png (a picture) or .npz (the pixels).")
    if not out.parent.is_dir():
        raise UserError(f"the folder of --out '{out}' does not exist.")
    if out.is_dir():
        raise UserError(f"--out '{out}' is a folder.")
