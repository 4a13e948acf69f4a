"""How the time of an iteration grows with k_x, k_z, the batch and the image size, and how linear that growth is.

python benchmarks/growth.py [TARGET] [KEY=VALUE ...] [--out FILE.png] [--repeats N] [--device D] [--json]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import common
from dualmcmc.bench import timing
from dualmcmc.bench.step import WARMUP, build_step
from dualmcmc.config import Config
from dualmcmc.engine.step import TrainStep
from dualmcmc.utils import plots
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import check_output
from dualmcmc.utils.geometry import downsampling_stages
from dualmcmc.utils.images import save_png
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress

STEP_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0)
BATCH_FACTORS = (0.25, 0.5, 1.0, 2.0)
SIZE_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
AXES = {"k_x": "x-chain steps", "k_z": "z-chain steps", "batch": "batch size", "pixels": "pixels per image"}


def measure(
    config: Config,
    device: str = "auto",
    repeats: int = 10,
    notify: Callable[[str], None] = lambda text: None,
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """Times as one quantity varies at a time, and a straight line fitted to them."""
    plan = timing.set_up(config, device, notify)

    def prepare(config: Config) -> TrainStep:
        step = build_step(config, plan)
        step.prepare(progress, notify)
        return step

    base = prepare(config)
    axes: dict[str, Any] = {}
    for name, label in AXES.items():
        points: list[tuple[int, float]] = []
        for value, step in variants(name, config, base, prepare):
            points.append((value, timing.median_seconds(step, plan.device, repeats, WARMUP)))
            notify(f"{label} {value}: {1000 * points[-1][1]:.2f} ms")
        if points:
            axes[name] = {"points": sorted(points)} | fit_line(points)
    return {**timing.describe(config, plan.device), "engine": base.plan.summary, "axes": axes}


def variants(
    name: str, config: Config, base: TrainStep, prepare: Callable[[Config], TrainStep]
) -> Iterator[tuple[int, TrainStep]]:
    """Values of one quantity, each with a step that has it. Only new shapes are compiled again."""
    teaching = config.teaching
    if name in ("k_x", "k_z"):
        key = "x_chain" if name == "k_x" else "z_chain"
        chain = getattr(teaching, key)
        for steps in scaled(chain.steps, STEP_FACTORS) if chain.steps else []:
            changes: dict[str, Any] = {key: replace(chain, steps=steps)}
            base.reconfigure(replace(config, teaching=replace(teaching, **changes)))
            yield steps, base
        base.reconfigure(config)
    elif name == "batch":
        for batch in scaled(config.train.batch, BATCH_FACTORS):
            same = batch == config.train.batch
            yield batch, base if same else prepare(replace(config, train=replace(config.train, batch=batch)))
    else:
        for size in image_sizes(config):
            same = size == config.data.size
            yield size**2, base if same else prepare(replace(config, data=replace(config.data, size=size)))


def image_sizes(config: Config) -> list[int]:
    """Sizes that the same architecture supports: up to the config's own, or above it if none is smaller."""
    own = config.data.size
    supported = [size for size in scaled(own, SIZE_FACTORS) if is_supported(size) and (size <= 32) == (own <= 32)]
    smaller = [size for size in supported if size <= own]
    return smaller if len(smaller) > 1 else supported


def is_supported(size: int) -> bool:
    try:
        downsampling_stages(size)
    except UserError:
        return False
    return size >= 8


def scaled(value: int, factors: tuple[float, ...]) -> list[int]:
    return sorted({max(1, round(value * factor)) for factor in factors})


def fit_line(points: list[tuple[int, float]]) -> dict[str, float]:
    """Least squares: seconds = intercept + slope * value; r2 is the fraction of the variance explained."""
    values, seconds = np.array(points, dtype=float).T
    if len(values) < 2:
        return {"slope": 0.0, "intercept": float(seconds[0]), "r2": 1.0}
    slope, intercept = np.polyfit(values, seconds, 1)
    residual = ((seconds - intercept - slope * values) ** 2).sum()
    total = ((seconds - seconds.mean()) ** 2).sum()
    return {"slope": float(slope), "intercept": float(intercept), "r2": float(1 - residual / total) if total else 1.0}


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{result['preset']}, {result['engine']}, {timing.format_environment(result)}"]
    for name, axis in result["axes"].items():
        times = "  ".join(f"{value}: {1000 * seconds:.2f}" for value, seconds in axis["points"])
        lines.append(f"{AXES[name]:16}  ms at {times}   linear fit R2 {axis['r2']:.4f}")
    return "\n".join(lines)


def save_plot(result: dict[str, Any], path: Path) -> None:
    """One panel per quantity: measured points and the fitted line."""
    figure = Figure(figsize=(2.6 * len(result["axes"]), 2.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(result["axes"])))
    for panel, (name, axis) in zip(panels, result["axes"].items(), strict=True):
        values, seconds = np.array(axis["points"], dtype=float).T
        panel.plot(values, 1000 * (axis["intercept"] + axis["slope"] * values), color=plots.SECOND, linewidth=1)
        panel.plot(values, 1000 * seconds, "o", color=plots.ACCENT, markersize=4)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        plots.style(panel, "", AXES[name], "ms per iteration", legend=False)
    save_png(plots.render(figure), path)


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="plot (default: none)")
    parser.add_argument("--repeats", type=common.at_least(1), default=10, help="iterations timed per point")
    args = parser.parse_intermixed_args()
    config = common.load_config(args)
    if args.out is not None:
        check_output(args.out, ".png")
    result = measure(config, args.device, args.repeats, common.notify, show_progress)
    if args.out is not None:
        save_plot(result, args.out)
    common.print_result(result, args.json, format_result)
    if args.out is not None and not args.json:
        print(f"plot: {args.out}")


if __name__ == "__main__":
    common.run(main)
