"""Notices a run that has left the healthy range."""

from __future__ import annotations

import math

from dualmcmc.config import Guard
from dualmcmc.errors import Diverged

ADVICE = (
    "Try a smaller optim.energy.lr, teaching.x_chain.step_size or teaching.z_chain.step_size, "
    "teaching.x_chain.clamp=1 or a grad_clip"
)


def check(record: dict[str, float], cfg: Guard) -> None:
    """Raise where any number is not finite or the energy gap is past its bound.

    `record` holds means over a window of iterations, in which one non-finite value shows.
    """
    for name, value in record.items():
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value}. {ADVICE}")
    gap = record["energy_gap_max"]
    if gap > cfg.energy_gap:
        raise Diverged(
            f"the energy gap between samples and data reached {gap:.4g}, "
            f"past guard.energy_gap={cfg.energy_gap:g}. {ADVICE}"
        )
