"""Detects divergence, and reduces rates after a rollback."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from dualmcmc.config import Config, Guard
from dualmcmc.utils.errors import Diverged


def advice(names: Collection[str]) -> str:
    """What to try, among the settings of a method with statistics of these names."""
    has = {"x": "x_displacement_rms" in names, "z": "z_displacement_rms" in names}
    rate = "optim.energy.lr" if "energy_gap" in names else "optim.generator.lr"
    *most, last = (rate, *(f"teaching.{chain}_chain.step_size" for chain, exists in has.items() if exists))
    smaller = f"{', '.join(most)} or {last}" if most else last
    clamp = ", teaching.x_chain.clamp=1 or a grad_clip" if has["x"] else ""
    return f"Try a smaller {smaller}{clamp}"


def check(record: dict[str, float], cfg: Guard) -> None:
    """Raise `Diverged` if a statistic is not finite, or if the energy gap or a displacement exceeds its limit.

    `record` contains means over a window of iterations; a single non-finite value makes its mean non-finite.
    """
    for name, value in record.items():
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value}. {advice(record)}")
    for name, what, limit in (
        ("energy_gap_max", "the energy gap between samples and data", "max_energy_gap"),
        ("x_displacement_rms", "the displacement of the x-chain", "max_x_displacement"),
        ("z_displacement_rms", "the displacement of the z-chain", "max_z_displacement"),
    ):
        if record.get(name, 0.0) > getattr(cfg, limit):
            size = f"{record[name]:.4g}, above guard.{limit}={getattr(cfg, limit):g}"
            raise Diverged(f"{what} is {size}. {advice(record)}")


def back_off(config: Config) -> tuple[Config, dict[str, float]]:
    """The settings to continue with after a divergence, and the reduced ones by name."""
    factor, optim, teaching = config.guard.backoff, config.optim, config.teaching
    reduced: dict[str, float] = {}
    adams, chains = {}, {}
    for name in ("energy", "generator", "inference"):
        adam = getattr(optim, name)
        reduced[f"optim.{name}.lr"] = adam.lr * factor
        adams[name] = replace(adam, lr=adam.lr * factor)
    for name in ("x_chain", "z_chain"):
        chain = getattr(teaching, name)
        reduced[f"teaching.{name}.step_size"] = chain.step_size * factor
        chains[name] = replace(chain, step_size=chain.step_size * factor)
    return replace(config, optim=replace(optim, **adams), teaching=replace(teaching, **chains)), reduced
