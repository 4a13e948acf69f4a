"""The paper's metrics of a trained run: FID and others of samples, MSE, PSNR and SSIM of reconstructions.

FID compares all training images with samples rounded to uint8: generator samples, and the same after the x-chain.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc import data
from dualmcmc.data.store import SubsetStore
from dualmcmc.metrics.fid import frechet_distance
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.metrics.quality import inception_score, kid, missing_torchmetrics, precision_recall
from dualmcmc.tasks.fid import FeatureSet, Origin, included_reference, load_features, reference_features
from dualmcmc.tasks.inputs import check_no_image_overrides, choose
from dualmcmc.tasks.reconstruct import compare_starts
from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.tasks.work import inception_steps, step_progress
from dualmcmc.utils.errors import UserError, nearest
from dualmcmc.utils.images import to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress
from dualmcmc.utils.tree import Tree

SAMPLE_METRICS = ("fid", "is", "kid", "precision", "recall")
RECONSTRUCTION_METRICS = {  # and the names of their results
    "mse": ("mse", "mse_0_to_1"),
    "psnr": ("psnr_db", "psnr_of_mean_mse_db"),
    "ssim": ("ssim",),
}
METRICS = (*SAMPLE_METRICS, *RECONSTRUCTION_METRICS)
SAMPLED = {"generator": "generator", "energy": "EBM"}  # what samples are called
DEFAULT = ("fid", "is", "mse", "psnr", "ssim")
NO_CLASSIFIER = (
    "the Inception Score needs the classifier, which these weights do not include: "
    "'dualmcmc data fetch inception --source official' downloads those that do"
)


@dataclass
class Evaluation(Tree):
    """Metrics of generator samples, EBM samples and reconstructions; metrics that were skipped, with the reason."""

    generator: dict[str, float] = field(default_factory=dict)
    ebm: dict[str, float] = field(default_factory=dict)
    reconstruction: dict[str, dict[str, float]] = field(default_factory=dict)  # of held-out images, if there are any
    train_reconstruction: dict[str, dict[str, float]] = field(default_factory=dict)  # of as many training images
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by part
    data: dict[str, Any] = field(default_factory=dict)  # the run's images, see `data.describe`
    reference: dict[str, Any] | None = None  # number of training images that FID compares with; their statistics
    reconstructed: dict[str, int] = field(default_factory=dict)  # number of images, by kind

    def numbers(self) -> dict[str, Any]:
        """All metrics, as they are saved."""
        names = ("generator", "ebm", "reconstruction", "train_reconstruction")
        return {name: getattr(self, name) for name in names}


def check_metrics(names: str | Sequence[str]) -> list[str]:
    """`names` without duplicates, if they are metrics; text is split at commas."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    for name in names:
        if name not in METRICS:
            raise UserError(f"unknown metric '{name}': use {', '.join(METRICS)}.{nearest(name, METRICS)}")
    return list(dict.fromkeys(names))


def evaluate(
    run: Run,
    metrics: str | Sequence[str] | None = None,
    samples: int = 50_000,
    images: data.DataSplits | None = None,
    features: FeatureExtractor | None = None,
    progress: ProgressFactory = show_progress,
    reconstructions: int | None = None,
) -> Evaluation:
    """Measure a run. `metrics`: `DEFAULT` if None, or "mse" if the run was not trained on images.

    `images`: its own if None; `features`: FID's network from the cache folder if None.

    `reconstructions`: at most so many held-out images, and as many training images, chosen by the run's seed. No images
    are read if they are not needed, see `needs_images`.
    Memory does not grow with the number of samples, except for KID, precision, recall and IS, which need all features.
    The processes of `run.world` share the work, and all get the result.
    """
    is_image = run.config.data.is_image
    wanted = check_metrics((DEFAULT if is_image else ("mse",)) if metrics is None else metrics)
    for name in wanted:
        if name != "mse":
            run.require_images(f"the metric {name}")
    if samples < 2:
        raise UserError(f"-n must be at least 2, not {samples}.")
    check_no_image_overrides(run)
    run.check_same_weights()
    if not run.world.is_main:
        progress = no_progress
    result = Evaluation()
    sample_metrics = [name for name in wanted if name in SAMPLE_METRICS]
    missing = [text for text in run.world.all_gather(missing_torchmetrics()) if text]  # all ranks measure the same
    for name in [name for name in sample_metrics if name in ("is", "kid") and missing]:
        result.skipped[name] = missing[0]
        sample_metrics.remove(name)
    if sample_metrics:
        features = features or load_features(device=run.device)
    if images is None and needs_images(run, wanted, features):
        with run.world.fail_together():
            images = run.load_data(progress)
    if images is not None:
        result.data = data.describe(run.trained_data, images)
    if "is" in sample_metrics and features is not None and not features.has_classifier:
        result.skipped["is"] = NO_CLASSIFIER
        sample_metrics.remove("is")
    if sample_metrics and features is not None:
        _measure_samples(result, run, images, sample_metrics, samples, features, progress)
    if not run.has("generator"):
        for name in [name for name in wanted if name in RECONSTRUCTION_METRICS]:
            result.skipped[name] = f"reconstruction needs a generator, which method={run.config.method} does not train"
            wanted.remove(name)
    reconstruction_names = [key for name in wanted for key in RECONSTRUCTION_METRICS.get(name, ())]
    if reconstruction_names and images is not None:
        start = time.monotonic()
        store, kind = images.test_or_train()
        store = choose(store, reconstructions, run.seed)
        result.reconstruction = _select(compare_starts(run, store, progress), reconstruction_names)
        result.reconstructed[kind] = len(store)
        if images.test is not None:
            store = SubsetStore(images.train, np.arange(min(len(images.test), len(images.train))))
            store = choose(store, reconstructions, run.seed)
            found = compare_starts(run, store, progress, from_noise=False)
            result.train_reconstruction = _select(found, reconstruction_names)
            result.reconstructed["training images"] = len(store)
        result.seconds["reconstruction"] = time.monotonic() - start
    if not (result.generator or result.ebm or result.reconstruction):
        raise UserError("nothing to measure: " + "; ".join(dict.fromkeys(result.skipped.values())) + ".")
    return result


def needs_images(run: Run, metrics: Sequence[str], features: FeatureExtractor | None) -> bool:
    """Whether the run's images are read: for FID and IS they are not, if the package includes their statistics."""
    if not run.has("generator"):  # nothing is reconstructed
        metrics = [name for name in metrics if name not in RECONSTRUCTION_METRICS]
        if not metrics:
            return False
    if features is None or not set(metrics) <= {"fid", "is"}:
        return True
    return any(run.world.all_gather(included_reference(run.trained_data, features) is None))


def _select(numbers: dict[str, dict[str, float]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    return {kind: {name: part[name] for name in part if name in names} for kind, part in numbers.items()}


def _measure_samples(
    result: Evaluation,
    run: Run,
    images: data.DataSplits | None,
    metrics: Sequence[str],
    count: int,
    features: FeatureExtractor,
    progress: ProgressFactory,
) -> None:
    start = time.monotonic()
    keep_real = bool({"kid", "precision", "recall"} & set(metrics))  # these need all features of the real images
    if images is None:
        included = included_reference(run.trained_data, features)
        assert included is not None  # see `needs_images`
        (real, key), origin = included, Origin.PACKAGE
        known = {"images": key["images"], "checksum": data.shorten(key["pixels"]), "notes": []}
        result.data = data.describe_settings(run.trained_data) | known
    else:
        real, origin = reference_features(images.train, result.data, features, keep_real, progress, run.world)
    result.reference = {"images": real.moments.count, "statistics": str(origin)}
    result.seconds["reference"] = time.monotonic() - start
    sampled = sample_features(run, count, features, keep_real or "is" in metrics, progress, result.seconds)
    start = time.monotonic()
    kinds = {"generator": result.generator, "energy": result.ebm}
    with progress("distances", len(sampled), "parts") as advance:
        for network, part in sampled.items():
            kinds[network] |= _metrics(part, real, metrics, features, run.seed)
            advance(1)
    result.seconds["numbers"] = time.monotonic() - start


def steps_per_sample(run: Run) -> int:
    """The work per sample: the steps of the x-chain, one for the generator, and the features of each kind."""
    steps = run.config.sampling_chain.steps if run.has("energy") else 0
    return steps + 1 + len(_kinds(run)) * inception_steps(run)


def _kinds(run: Run) -> list[str]:
    """The networks whose samples are measured: the generator's, and the energy's after the x-chain."""
    return [network for network in ("generator", "energy") if run.has(network)]


def sample_features(
    run: Run,
    count: int,
    features: FeatureExtractor,
    keep: bool = False,
    progress: ProgressFactory = no_progress,
    seconds: dict[str, float] | None = None,
) -> dict[str, FeatureSet]:
    """Features of samples rounded to uint8: of the `generator`, and of the same after the x-chain on the `energy`.

    `seconds`, if given, receives the time for sampling and for features.
    """
    result = {network: FeatureSet(features, keep, count) for network in _kinds(run)}
    spent = {"sampling": 0.0, "features": 0.0}
    last = 0.0

    def lap(part: str) -> None:
        nonlocal last
        if seconds is not None:
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
            spent[part] += time.monotonic() - last
            last = time.monotonic()

    run.prepare(count, progress)
    last = time.monotonic()
    steps, task = steps_per_sample(run), f"samples, {' and '.join(SAMPLED[network] for network in _kinds(run))}"
    with run.world.fail_together(), step_progress(run, progress, task, count, steps, run.world) as done:
        for first, generated, revised in run.sample_batches(count):
            done(len(generated), 1)
            lap("sampling")
            samples = {"generator": generated, "energy": revised}
            for network, target in result.items():
                pixels = to_uint8(require_finite(samples[network]))
                target.add(pixels, first, lambda images: done(images, inception_steps(run)))
            lap("features")
    for target in result.values():
        target.all_gather(run.world)
    if seconds is not None:
        seconds |= spent
    return result


def _metrics(
    sampled: FeatureSet, real: FeatureSet, metrics: Sequence[str], features: FeatureExtractor, seed: int
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    if "fid" in metrics:
        numbers[features.metric_name] = frechet_distance(sampled.moments, real.moments)
    if "is" in metrics:
        scores: Tensor = features.class_scores(sampled.rows().to(features.device))
        numbers["is"], numbers["is_std"] = inception_score(scores, seed)
    if "kid" in metrics:
        numbers["kid"], numbers["kid_std"] = kid(sampled.rows().to(features.device), real.rows(), seed)
    if {"precision", "recall"} & set(metrics):
        both = precision_recall(sampled.rows().to(features.device), real.rows())
        numbers |= {name: value for name, value in zip(("precision", "recall"), both, strict=True) if name in metrics}
    return numbers
