"""How long an evaluation takes, by part: samples, features, the distance."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.metrics.features import Features
from dualmcmc.metrics.frechet import frechet_distance
from dualmcmc.metrics.inception import FEATURES, Inception
from dualmcmc.nets import build
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.evaluate import sample_features
from dualmcmc.tasks.run import Run


def measure(
    config: Config, samples: int, device: str, say: Callable[[str], None], watch: Watch = quiet
) -> dict[str, Any]:
    """`samples` generator samples, the same after the x-chain, the features of both, and one distance."""
    place = timing.begin(config, device, say).device
    run = Run(config, build(config), place, images=0)
    features = Features(Inception(), FEATURES, place, standard=False, checksum="")
    run.expect(samples, watch)
    sample_features(run, min(samples, config.sampling.batch), features)  # kernels are chosen, memory is laid out
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
        torch.cuda.synchronize(place)
    seconds: dict[str, float] = {}
    begun = time.monotonic()
    drawn = sample_features(run, samples, features, watch=watch, seconds=seconds)
    before = time.monotonic()
    frechet_distance(drawn[0].moments, drawn[1].moments)
    seconds["distance"] = time.monotonic() - before
    total = time.monotonic() - begun
    return {
        **timing.described(config, place),
        "samples": samples,
        "steps": config.sampling_chain.steps,
        "engine": run.engine,
        "batch": config.sampling.batch,
        "seconds": total,
        "seconds_of": seconds,
        "samples_per_second": samples / total,
        "drawn_per_second": samples / seconds["drawing"],
        "features_per_second": 2 * samples / seconds["features"],  # each sample is looked at twice
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(place) if place.type == "cuda" else None,
    }


def in_words(result: dict[str, Any]) -> str:
    """The result as a table."""
    parts = result["seconds_of"]
    lines = [
        f"{result['preset']}, {result['samples']:,} samples, x-chain of {result['steps']} steps, batch "
        f"{result['batch']}, {result['engine']}, {timing.where(result)}",
        f"drawing, with the x-chain  {parts['drawing']:8.1f} s  {result['drawn_per_second']:10,.0f} samples/s",
        f"Inception's features       {parts['features']:8.1f} s  {result['features_per_second']:10,.0f} images/s "
        "(generator and EBM)",
        f"one Fréchet distance       {parts['distance']:8.1f} s",
        f"all of it                  {result['seconds']:8.1f} s  {result['samples_per_second']:10,.0f} samples/s",
    ]
    if result["peak_gpu_bytes"] is not None:
        lines.append(f"peak GPU memory            {result['peak_gpu_bytes'] / 2**30:8.1f} GiB")
    return "\n".join(lines)
