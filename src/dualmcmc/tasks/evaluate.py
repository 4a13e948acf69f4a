"""The numbers of the paper for a trained run: FID and its kin on samples, MSE, PSNR and SSIM on reconstructions.

FID is of samples rounded to bytes, against all training images; of generator samples and of the same
after the x-chain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dualmcmc import data
from dualmcmc.errors import UserError, nearest
from dualmcmc.metrics.features import Features, load_features
from dualmcmc.metrics.frechet import frechet_distance
from dualmcmc.metrics.kernel import inception_score, kernel_distance, precision_recall
from dualmcmc.pictures import to_uint8
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.reconstruct import compare_starts
from dualmcmc.tasks.reference import FeatureSet, reference
from dualmcmc.tasks.run import Run, finite

OF_SAMPLES = ("fid", "is", "kid", "precision", "recall")
OF_RECONSTRUCTIONS = ("mse", "psnr", "ssim")
METRICS = (*OF_SAMPLES, *OF_RECONSTRUCTIONS)
DEFAULT = ("fid", "is", "mse", "psnr", "ssim")
NO_CLASSIFIER = (
    "the Inception Score needs the classifier, which these weights do not have: "
    "'dualmcmc data fetch inception --source official' gets those that do"
)


@dataclass
class Evaluation:
    """Numbers of generator samples, of EBM samples and of reconstructions; what was left out, and why."""

    generator: dict[str, float] = field(default_factory=dict)
    ebm: dict[str, float] = field(default_factory=dict)
    reconstruction: dict[str, dict[str, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reference_cached: bool | None = None  # whether the training images' statistics were known already

    def numbers(self) -> dict[str, Any]:
        """All of them, as they are recorded."""
        return {"generator": self.generator, "ebm": self.ebm, "reconstruction": self.reconstruction}


def check_metrics(names: Sequence[str]) -> list[str]:
    """Names of metrics that are known, each once."""
    for name in names:
        if name not in METRICS:
            raise UserError(f"there is no metric '{name}': use {', '.join(METRICS)}.{nearest(name, METRICS)}")
    return list(dict.fromkeys(names))


def evaluate(
    run: Run,
    metrics: Sequence[str] = DEFAULT,
    samples: int = 50_000,
    images: data.Images | None = None,
    features: Features | None = None,
    watch: Watch = quiet,
) -> Evaluation:
    """Measure a run. `images`: None for its own; `features`: None for FID's network as it was fetched.

    Memory does not grow with the samples, but for KID, precision, recall and IS, which need all features. The processes
    of the run's crew share the work, and all have the result.
    """
    wanted = check_metrics(metrics)
    if samples < 2:
        raise UserError(f"--samples must be at least 2, not {samples}.")
    run.check_alike()
    result = Evaluation()
    of_samples = [name for name in wanted if name in OF_SAMPLES]
    if of_samples:
        features = features or load_features(device=run.device)
    images = images or data.load(run.config.data, watch)
    if "is" in of_samples and features is not None and not features.has_classifier:
        result.left_out["is"] = NO_CLASSIFIER
        of_samples.remove("is")
    if of_samples and features is not None:
        _measure_samples(result, run, images, of_samples, samples, features, watch)
    of_reconstructions = {name for name in wanted if name in OF_RECONSTRUCTIONS}
    if of_reconstructions:
        begun = time.monotonic()
        found = compare_starts(run, images.held_out()[0], watch)
        for start, numbers in found.items():  # mse_unit is mse on another scale
            result.reconstruction[start] = {
                name: value for name, value in numbers.items() if name.removesuffix("_unit") in of_reconstructions
            }
        result.seconds["reconstruction"] = time.monotonic() - begun
    if not (result.generator or result.reconstruction):
        raise UserError("nothing is left to measure: " + "; ".join(result.left_out.values()) + ".")
    return result


def _measure_samples(
    result: Evaluation,
    run: Run,
    images: data.Images,
    metrics: Sequence[str],
    count: int,
    features: Features,
    watch: Watch,
) -> None:
    begun = time.monotonic()
    whole = bool({"kid", "precision", "recall"} & set(metrics))  # what needs all features of the real images
    what = data.describe(run.config.data, images)
    real, result.reference_cached = reference(images.train, what, features, whole, watch, run.crew)
    result.seconds["reference"] = time.monotonic() - begun
    drawn = sample_features(run, count, features, whole or "is" in metrics, watch, result.seconds)
    begun = time.monotonic()
    result.generator, result.ebm = (_numbers(part, real, metrics, features, run.seed) for part in drawn)
    result.seconds["numbers"] = time.monotonic() - begun


def sample_features(
    run: Run,
    count: int,
    features: Features,
    keep: bool = False,
    watch: Watch = quiet,
    seconds: dict[str, float] | None = None,
) -> tuple[FeatureSet, FeatureSet]:
    """Features of generator samples and of the same after the x-chain, both rounded to bytes.

    `seconds`, where given, receives how long drawing and looking took.
    """
    found = FeatureSet(features, keep), FeatureSet(features, keep)
    spent = {"drawing": 0.0, "features": 0.0}
    last = 0.0

    def lap(what: str) -> None:
        nonlocal last
        if seconds is not None:
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
            spent[what] += time.monotonic() - last
            last = time.monotonic()

    run.expect(count, watch)
    last = time.monotonic()
    with run.crew.alike(), watch("samples, generator and EBM", count, "images") as advance:
        for first, *parts in run.draw(count):
            lap("drawing")
            for target, part in zip(found, parts, strict=True):
                target.add(features(to_uint8(finite(part))), first)
            lap("features")
            advance(len(parts[0]) * run.crew.world)
    for target in found:
        target.join(run.crew)
    if seconds is not None:
        seconds |= spent
    return found


def _numbers(
    drawn: FeatureSet, real: FeatureSet, metrics: Sequence[str], features: Features, seed: int
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    if "fid" in metrics:
        numbers[features.distance_name] = frechet_distance(drawn.moments, real.moments)
    if "is" in metrics:
        scores: Tensor = features.class_scores(drawn.rows().to(features.device))
        numbers["is"], numbers["is_std"] = inception_score(scores, seed)
    if "kid" in metrics:
        pair = drawn.rows().to(features.device), real.rows()
        numbers["kid"], numbers["kid_std"] = kernel_distance(*pair, seed)
    if {"precision", "recall"} & set(metrics):
        both = precision_recall(drawn.rows().to(features.device), real.rows())
        numbers |= {n: v for n, v in zip(("precision", "recall"), both, strict=True) if n in metrics}
    return numbers
