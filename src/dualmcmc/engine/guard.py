"""Notices a run that has left the healthy range."""

from __future__ import annotations

import math
from dataclasses import replace

from dualmcmc.config import Config, Guard
from dualmcmc.errors import Diverged

ADVICE = (
    "Try a smaller optim.energy.lr, teaching.x_chain.step_size or teaching.z_chain.step_size, "
    "teaching.x_chain.clamp=1 or a grad_clip"
)


def check(record: dict[str, float], cfg: Guard) -> None:
    """Raise where any number is not finite, or the energy gap or the way of a chain is past its bound.

    `record` holds means over a window of iterations, in which one non-finite value shows.
    """
    for name, value in record.items():
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value}. {ADVICE}")
    for name, words, bound in (
        ("energy_gap_max", "the energy gap between samples and data reached", "energy_gap"),
        ("x_moved", "the x-chain moved images by", "x_moved"),
        ("z_moved", "the z-chain moved latents by", "z_moved"),
    ):
        if record[name] > getattr(cfg, bound):
            raise Diverged(f"{words} {record[name]:.4g}, past guard.{bound}={getattr(cfg, bound):g}. {ADVICE}")


def gentler(config: Config) -> tuple[Config, dict[str, float]]:
    """The settings to try after a divergence, and those that are other than before: learning rates and step sizes."""
    factor, optim, teaching = config.guard.lower, config.optim, config.teaching
    lowered: dict[str, float] = {}
    adams, chains = {}, {}
    for name in ("energy", "generator", "inference"):
        adam = getattr(optim, name)
        lowered[f"optim.{name}.lr"] = adam.lr * factor
        adams[name] = replace(adam, lr=adam.lr * factor)
    for name in ("x_chain", "z_chain"):
        chain = getattr(teaching, name)
        lowered[f"teaching.{name}.step_size"] = chain.step_size * factor
        chains[name] = replace(chain, step_size=chain.step_size * factor)
    return replace(config, optim=replace(optim, **adams), teaching=replace(teaching, **chains)), lowered
