"""The time of an evaluation by part: samples, Inception features, the Fréchet distance.

    python benchmarks/evaluate.py [TARGET] [KEY=VALUE ...] [--samples N] [--device D] [--json]

The networks and Inception have random weights, which take the same time: nothing has to be trained or downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import common
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.metrics.fid import frechet_distance
from dualmcmc.metrics.inception import FEATURE_DIM, FeatureExtractor, Inception
from dualmcmc.nets import build
from dualmcmc.tasks.evaluate import sample_features
from dualmcmc.tasks.run import Run
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress


def measure(
    config: Config,
    samples: int,
    device_name: str = "auto",
    notify: Callable[[str], None] = lambda text: None,
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """`samples` generator samples, the same after the x-chain, the features of both, and one distance."""
    device = timing.set_up(config, device_name, notify).device
    run = Run(config, build(config), device, images=0)
    features = FeatureExtractor(Inception(), FEATURE_DIM, device, standard=False, checksum="")
    run.prepare(samples, progress)
    sample_features(run, min(samples, config.sampling.batch), features)  # warm-up
    timing.synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    parts: dict[str, float] = {}
    start = time.monotonic()
    sampled = sample_features(run, samples, features, progress=progress, seconds=parts)
    before = time.monotonic()
    frechet_distance(sampled["generator"].moments, sampled["energy"].moments)
    parts["distance"] = time.monotonic() - before
    total = time.monotonic() - start
    return {
        **timing.describe(config, device),
        "samples": samples,
        "x_chain_steps": config.sampling_chain.steps,
        "engine": run.engine,
        "batch": config.sampling.batch,
        "seconds": total,
        "seconds_by_part": parts,
        "samples_per_second": samples / total,
        "sampling_per_second": samples / parts["sampling"],
        "features_per_second": 2 * samples / parts["features"],  # of the generator and of the EBM
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    parts = result["seconds_by_part"]
    lines = [
        f"{result['preset']}, {result['samples']:,} samples, x-chain of {result['x_chain_steps']} steps, batch "
        f"{result['batch']}, {result['engine']}, {timing.format_environment(result)}",
        f"sampling with the x-chain  {parts['sampling']:8.1f} s  {result['sampling_per_second']:10,.0f} samples/s",
        f"Inception features         {parts['features']:8.1f} s  {result['features_per_second']:10,.0f} images/s "
        "(generator and EBM)",
        f"one Fréchet distance       {parts['distance']:8.1f} s",
        f"total                      {result['seconds']:8.1f} s  {result['samples_per_second']:10,.0f} samples/s",
    ]
    if result["peak_gpu_bytes"] is not None:
        lines.append(f"peak GPU memory            {result['peak_gpu_bytes'] / 2**30:8.1f} GiB")
    return "\n".join(lines)


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--samples", type=common.at_least(100), default=50_000, help="samples of each kind")
    args = parser.parse_intermixed_args()
    result = measure(common.load_config(args), args.samples, args.device, common.notify, show_progress)
    common.print_result(result, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
