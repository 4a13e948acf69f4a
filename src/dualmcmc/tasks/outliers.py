"""Out-of-distribution detection: separating images of other datasets from the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data.store import SubsetStore
from dualmcmc.metrics.detection import detection
from dualmcmc.metrics.pixels import mse
from dualmcmc.tasks.convert import as_store
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.run import Run
from dualmcmc.utils.errors import NotFinite, UserError, nearest, sanitize
from dualmcmc.utils.images import stacked
from dualmcmc.utils.plots import histograms
from dualmcmc.utils.progress import ProgressFactory, show_progress
from dualmcmc.utils.tree import Tree

SCORES = {
    "energy": "E(x), as in the paper",
    "typicality": "|E(x) - mean E of training images|",
    "reconstruction": "MSE of inference + z-chain, pixels in [-1, 1]",
}
IN_DISTRIBUTION = "in_distribution"  # the name of the run's own images
TYPICALITY_IMAGES = 10_000  # training images whose mean energy is used


@dataclass(frozen=True)
class Detection(Tree):
    """Scores of every image, and how well they separate each dataset from the run's own images."""

    scores: dict[str, dict[str, Tensor]]  # score -> dataset -> (N,)
    numbers: dict[str, dict[str, dict[str, float]]]  # dataset -> score -> see `metrics.detection`


def check_scores(names: list[str]) -> list[str]:
    """`names`, if they are scores."""
    for name in names:
        if name not in SCORES:
            raise UserError(f"unknown score '{name}': use {', '.join(SCORES)}.{nearest(name, SCORES)}")
    return names


def steps_per_image(run: Run, scores: list[str]) -> int:
    """The work of scoring an image: the steps of the z-chain, if there is one, and one for the rest."""
    return (run.config.teaching.z_chain.steps if "reconstruction" in scores else 0) + 1


def outliers(
    run: Run,
    in_distribution: Any,
    others: Mapping[str, Any],
    scores: list[str],
    progress: ProgressFactory = show_progress,
) -> Detection:
    """Score the run's held-out images and those of other datasets; a higher score means more of an outlier.

    Images: an `ImageStore`, or what `Run` takes.
    """
    check_scores(scores)
    for score in scores:
        run.require("generator" if score == "reconstruction" else "energy", f"the score {score}")
    if IN_DISTRIBUTION in others:
        raise UserError(f"a dataset cannot be called '{IN_DISTRIBUTION}': that is the name of the run's own images.")
    rng = run.generator_for("z-chain")
    mean = _mean_energy(run, progress) if "typicality" in scores else 0.0
    values: dict[str, dict[str, Tensor]] = {score: {} for score in scores}
    for name, images in {IN_DISTRIBUTION: in_distribution, **others}.items():
        store = as_store(images, run.config.data)
        parts: dict[str, list[Tensor]] = {score: [] for score in scores}
        for _, x in batches(run, store, progress, f"scoring {sanitize(name)}", steps_per_image(run, scores)):
            for score, part in _scores(run, scores, x, mean, rng).items():
                parts[score].append(part.double().cpu())
        for score in scores:
            values[score][name] = torch.cat(parts[score])
            if not values[score][name].isfinite().all():
                raise NotFinite(f"the {score} of some images of {name} is not finite: the run has diverged.")
    numbers = {
        name: {score: detection(values[score][IN_DISTRIBUTION], values[score][name]) for score in scores}
        for name in others
    }
    return Detection(values, numbers)


def _scores(run: Run, scores: list[str], x: Tensor, mean_energy: float, rng: torch.Generator) -> dict[str, Tensor]:
    values = {}
    if {"energy", "typicality"} & set(scores):
        energy = run.energy(x)
        values = {"energy": energy, "typicality": (energy - mean_energy).abs()}
    if "reconstruction" in scores:
        values["reconstruction"] = mse(x, run.reconstruct(x, rng=rng, temperature=None))
    return {score: values[score] for score in scores}


def _mean_energy(run: Run, progress: ProgressFactory) -> float:
    """The mean energy of training images, so that no scored image contributes to it."""
    train = run.load_data().train
    chosen = SubsetStore(train, np.random.default_rng(0).permutation(len(train))[:TYPICALITY_IMAGES])
    total = sum(float(run.energy(x).double().sum()) for _, x in batches(run, chosen, progress, "mean energy"))
    return total / len(chosen)


def format_verdict(auroc: float) -> str:
    """Text after an AUROC below 0.5."""
    return "  worse than chance" if auroc < 0.5 else ""


def picture(result: Detection) -> Tensor:
    """Histograms of each score, all datasets on one axis."""
    return stacked(*(_histograms(result, score) for score in result.scores))


def _histograms(result: Detection, score: str) -> Tensor:
    aurocs = {name: numbers[score]["auroc"] for name, numbers in result.numbers.items()}
    labels = {name: f"{name}  AUROC {auroc:.3f}{format_verdict(auroc)}" for name, auroc in aurocs.items()}
    labels[IN_DISTRIBUTION] = "in-distribution"
    values = {labels[name]: numbers for name, numbers in result.scores[score].items()}
    return histograms(values, SCORES[score], score)
