"""How the time of an iteration grows with each thing that makes it longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualmcmc import plots
from dualmcmc.bench import timing
from dualmcmc.bench.check import build_iteration
from dualmcmc.config import Config, stages
from dualmcmc.engine.graph import WARM_UP
from dualmcmc.engine.iteration import Iteration
from dualmcmc.errors import UserError
from dualmcmc.pictures import save_png
from dualmcmc.progress import Watch, quiet

SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)  # of what the settings say
SIDES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # of an image
AXES = {
    "k_x": "steps of the x-chain",
    "k_z": "steps of the z-chain",
    "batch": "images in a batch",
    "pixels": "pixels of an image",
}


def measure(
    config: Config,
    device: str = "auto",
    repeats: int = 10,
    say: Callable[[str], None] = lambda text: None,
    watch: Watch = quiet,
) -> dict[str, Any]:
    """Times of our engine as one thing at a time becomes more or less, and the straight line through them."""
    means = timing.begin(config, device, say)
    axes: dict[str, Any] = {}

    def prepared(config: Config) -> Iteration:
        iteration = build_iteration(config, means)
        iteration.prepare(watch, say)
        return iteration

    own = prepared(config)
    for name in AXES:
        points: list[tuple[int, float]] = []
        for value, iteration in _variants(name, config, own, prepared):
            points.append((value, timing.seconds(iteration, means.device, repeats, WARM_UP + 2)))
            say(f"{AXES[name]} {value}: {1000 * points[-1][1]:.2f} ms")
        if points:
            axes[name] = {"points": sorted(points)} | _line(points)
    return {
        **timing.described(config, means.device),
        "engine": own.means.in_words,
        "axes": axes,
    }


def _variants(
    name: str, config: Config, own: Iteration, prepared: Callable[[Config], Iteration]
) -> Iterator[tuple[int, Iteration]]:
    """The value of one thing, and an iteration that has it. Networks are compiled again only where shapes change."""
    teaching = config.teaching
    if name in ("k_x", "k_z"):
        chain = teaching.x_chain if name == "k_x" else teaching.z_chain
        for steps in _values(chain.steps, SHARES) if chain.steps else []:
            changed = replace(chain, steps=steps)
            longer = replace(teaching, x_chain=changed) if name == "k_x" else replace(teaching, z_chain=changed)
            own.go_on_with(replace(config, teaching=longer))
            yield steps, own
        own.go_on_with(config)
    elif name == "batch":
        for batch in _values(config.train.batch, (0.25, 0.5, 1.0, 2.0)):
            same = batch == config.train.batch
            yield batch, own if same else prepared(replace(config, train=replace(config.train, batch=batch)))
    else:
        for side in _sides(config):
            same = side == config.data.size
            yield side**2, own if same else prepared(replace(config, data=replace(config.data, size=side)))


def _sides(config: Config) -> list[int]:
    """Sizes of image that the same networks take: smaller ones, or larger ones where there are none."""
    own = config.data.size
    fitting = [side for side in _values(own, SIDES) if _fits(side) and (side <= 32) == (own <= 32)]
    smaller = [side for side in fitting if side <= own]
    return smaller if len(smaller) > 1 else fitting


def _fits(side: int) -> bool:
    try:
        stages(side)
    except UserError:
        return False
    return side >= 8


def _values(own: int, shares: tuple[float, ...]) -> list[int]:
    return sorted({max(1, round(own * share)) for share in shares})


def _line(points: list[tuple[int, float]]) -> dict[str, float]:
    """Least squares: seconds = start + slope * value; and the share of the variance that it explains."""
    values, seconds = np.array(points, dtype=float).T
    if len(values) < 2:
        return {"slope": 0.0, "start": float(seconds[0]), "r2": 1.0}
    slope, start = np.polyfit(values, seconds, 1)
    rest, all_of_it = ((seconds - start - slope * values) ** 2).sum(), ((seconds - seconds.mean()) ** 2).sum()
    return {"slope": float(slope), "start": float(start), "r2": float(1 - rest / all_of_it) if all_of_it else 1.0}


def in_words(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{result['preset']}, {result['engine']}, {timing.where(result)}"]
    for name, axis in result["axes"].items():
        words = AXES[name]
        times = "  ".join(f"{value}: {1000 * seconds:.2f}" for value, seconds in axis["points"])
        lines.append(f"{words:22} ms at {times}   straight line R2 {axis['r2']:.4f}")
    return "\n".join(lines)


def save_plot(result: dict[str, Any], path: Path) -> None:
    """One panel for each thing: what was measured, and the straight line."""
    panels = []
    for name, axis in result["axes"].items():
        words = AXES[name]
        values, seconds = zip(*axis["points"], strict=True)
        line = [1000 * (axis["start"] + axis["slope"] * value) for value in values]
        panels.append((words, values, [1000 * second for second in seconds], line))
    save_png(plots.fits(panels, "ms an iteration"), path)
