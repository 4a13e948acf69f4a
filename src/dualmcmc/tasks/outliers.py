"""Telling images of another kind from those the run knows (sec. Out-of-Distribution Detection)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dualmcmc import data
from dualmcmc.data.store import Store, Subset
from dualmcmc.errors import UserError, nearest
from dualmcmc.metrics.detection import detection
from dualmcmc.metrics.pixels import squared_errors
from dualmcmc.pictures import stacked
from dualmcmc.plots import histograms
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.inputs import batches
from dualmcmc.tasks.run import Run

SCORES = {
    "energy": "E(x), the paper's",
    "typicality": "|E(x) - mean E of training images|",
    "reconstruction": "MSE of inference + z-chain, pixels in [-1, 1]",
}
KNOWN = "known"  # what the run's own images are called among the sets
TYPICAL = 10_000  # training images that the mean energy is taken of


@dataclass(frozen=True)
class Detection:
    """Scores of every image, and how well they tell each set from the known one."""

    scores: dict[str, dict[str, Tensor]]  # score -> set -> (N,); "known" is the run's own
    numbers: dict[str, dict[str, dict[str, float]]]  # set -> score -> auroc, aupr_outliers, aupr_known, fpr95


def check_scores(names: list[str]) -> list[str]:
    """Names of scores that are known."""
    for name in names:
        if name not in SCORES:
            raise UserError(f"there is no score '{name}': use {', '.join(SCORES)}.{nearest(name, SCORES)}")
    return names


def outliers(run: Run, known: Store, others: Mapping[str, Store], scores: list[str], watch: Watch = quiet) -> Detection:
    """Score the run's held-out images `known` and those of `others`; higher means more of an outlier."""
    check_scores(scores)
    if KNOWN in others:
        raise UserError(f"a set cannot be called '{KNOWN}': that is what the run's own images are called.")
    sets = {KNOWN: known, **others}
    rng = run.stream("z-chain")
    middle = _mean_energy(run, watch) if "typicality" in scores else 0.0
    found: dict[str, dict[str, Tensor]] = {score: {} for score in scores}
    for name, store in sets.items():
        parts: dict[str, list[Tensor]] = {score: [] for score in scores}
        for _, x in batches(run, store, watch, f"scoring {name}"):
            for score, values in _scores(run, scores, x, middle, rng).items():
                parts[score].append(values.double().cpu())
        for score in scores:
            found[score][name] = torch.cat(parts[score])
            if not found[score][name].isfinite().all():
                raise UserError(f"the {score} of some images of {name} is not finite: the run has diverged there.")
    numbers = {name: {score: detection(found[score][KNOWN], found[score][name]) for score in scores} for name in others}
    return Detection(found, numbers)


def _scores(run: Run, scores: list[str], x: Tensor, middle: float, rng: torch.Generator) -> dict[str, Tensor]:
    energy = run.energy(x)
    found = {"energy": energy, "typicality": (energy - middle).abs()}
    if "reconstruction" in scores:
        found["reconstruction"] = squared_errors(x, run.reconstruct(x, rng=rng))
    return {score: found[score] for score in scores}


def _mean_energy(run: Run, watch: Watch) -> float:
    """Of training images, so that no image that is judged has a say in it."""
    train = data.load(run.config.data).train
    chosen = np.random.default_rng(0).permutation(len(train))[:TYPICAL]
    total = sum(
        float(run.energy(x).double().sum()) for _, x in batches(run, Subset(train, chosen), watch, "mean energy")
    )
    return total / len(chosen)


def picture(result: Detection) -> Tensor:
    """Histograms of each score, all sets on one axis."""
    return stacked(*(histograms(sets, SCORES[score], score) for score, sets in result.scores.items()))
