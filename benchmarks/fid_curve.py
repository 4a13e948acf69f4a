"""FID over the course of training, measured on the snapshots that a run kept (`train.snapshot_every`).

    python benchmarks/fid_curve.py RUN|FILE.json ... [-n N] [--line FID=LABEL] [--out FILE.png] [--device D] [--json]

With --json the measured curves are printed; saved to a file, they can be plotted again beside those of other runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

import common
import dualmcmc
from dualmcmc import data
from dualmcmc.bench import timing
from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.health.history import curve, effective_lines
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.fid import load_features
from dualmcmc.utils import plots
from dualmcmc.utils.device import resolve_device
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import check_output
from dualmcmc.utils.images import save_png
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress


def measure(
    path: Path,
    samples: int,
    features: FeatureExtractor,
    device_name: str = "auto",
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """FID of generator and EBM samples of every kept snapshot, with the minutes of training up to it."""
    folder = RunFolder(path)
    folder.require_run()
    snapshots = folder.kept_snapshots()
    if not snapshots:
        raise UserError(f"'{path}' has no snapshots: train with train.snapshot_every=IMAGES.")
    seconds = curve(effective_lines(read_log(folder.log)), "seconds")
    run = dualmcmc.load(snapshots[0], device=device_name)
    real = data.load(run.trained_data, progress)
    points = []
    for snapshot in snapshots:
        current = dualmcmc.load(snapshot, device=device_name)
        if (current.config.sampling_chain, current.config.sampling) == (run.config.sampling_chain, run.config.sampling):
            run.trio.load_state_dict(current.trio.state_dict())  # compiled only once
        else:  # the run was resumed with other settings
            run = current
        result = evaluate(run, ["fid"], samples, real, features, progress)
        seen = int(snapshot.stem)
        points.append(
            {
                "images": seen,
                "minutes": max((spent for images, spent in seconds if images <= seen), default=0.0) / 60,
                "generator": result.generator[features.metric_name],
                "ebm": result.ebm[features.metric_name],
            }
        )
    return {
        **timing.describe(run.config, run.device),
        "run": path.resolve().name,
        "metric": features.metric_name,
        "samples": samples,
        "x_chain_steps": run.config.sampling_chain.steps,
        "points": points,
    }


def load_result(path: Path) -> list[dict[str, Any]]:
    """The curves of an earlier call with --json."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        format_result(result)  # uses every entry
        valid = all(point["ebm"] > 0 and point["minutes"] >= 0 for one in result["curves"] for point in one["points"])
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}.") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid or not result["curves"]:
        raise UserError(f"'{path}' is not the result of an earlier call with --json.")
    curves: list[dict[str, Any]] = result["curves"]
    return curves


def format_result(result: dict[str, Any]) -> str:
    """One table per run."""
    lines = []
    for one in result["curves"]:
        lines.append(
            f"{one['run']}: {one['metric'].upper()} of {one['samples']:,} samples, "
            f"x-chain of {one['x_chain_steps']} steps, measured on {timing.format_environment(one)}"
        )
        lines.append(f"{'images':>12}  {'minutes':>8}  {'generator':>10}  {'EBM':>8}")
        for point in one["points"]:
            numbers = f"{point['minutes']:8.1f}  {point['generator']:10.2f}  {point['ebm']:8.2f}"
            lines.append(f"{point['images']:12,}  {numbers}")
    return "\n".join(lines)


def save_plot(curves: Sequence[dict[str, Any]], levels: Sequence[tuple[float, str]], path: Path) -> None:
    """FID of EBM samples against minutes of training, with horizontal lines for comparison."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for colour, one in zip(plots.COLOURS * len(curves), curves, strict=False):
        points = [point for point in one["points"] if point["minutes"] > 0]
        minutes, values = [point["minutes"] for point in points], [point["ebm"] for point in points]
        axes.plot(minutes, values, marker=".", color=colour, label=one["run"])
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # 5, 10, 20 instead of powers of ten
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for level, label in levels:
        axes.axhline(level, color=plots.INK, linewidth=0.8, linestyle="--")
        axes.text(
            0.99, level, f"{label}: {level:g}", fontsize=8, color=plots.INK, ha="right", va="bottom",
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
    kinds = sorted({f"{one['metric'].upper()} of {one['samples']:,} samples" for one in curves})
    plots.style(axes, "; ".join(kinds), "minutes of training", "FID of EBM samples", legend=True)
    save_png(plots.render(figure), path)


def parse_level(text: str) -> tuple[float, str]:
    """FID=LABEL."""
    number, _, label = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or not label:
        raise argparse.ArgumentTypeError(f"'{text}' must be FID=LABEL, such as 9.26=paper")
    return value, label


def main() -> None:
    parser = common.Parser(__doc__, takes_config=False)
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN|FILE.json", help="run folder, or saved curves")
    parser.add_argument("-n", type=common.at_least(2), default=10_000, help="samples per snapshot (default: 10000)")
    parser.add_argument(
        "--line", type=parse_level, action="append", default=[], metavar="FID=LABEL", help="a value to compare with"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="plot (default: none)")
    args = parser.parse_intermixed_args()
    if args.out is not None:
        check_output(args.out, ".png")
    elif args.line:
        parser.error("--line needs --out")
    curves: list[dict[str, Any]] = []
    features: FeatureExtractor | None = None
    for path in args.paths:
        if path.suffix == ".json":
            curves += load_result(path)
        else:
            features = features or load_features(device=resolve_device(args.device))
            curves.append(measure(path, args.n, features, args.device, show_progress))
    if args.out is not None:
        if not any(point["minutes"] > 0 for one in curves for point in one["points"]):
            raise UserError("nothing to plot: the minutes of training are unknown without the run's log.jsonl.")
        save_plot(curves, args.line, args.out)
    common.print_result({"curves": curves}, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
