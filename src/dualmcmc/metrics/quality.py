"""Metrics that need all features, not only their moments: KID, Inception Score, precision and recall.

The caller gathers the features of all processes, so torchmetrics must not (`sync_on_compute`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dualmcmc.utils.errors import UserError
from dualmcmc.utils.extras import require

SUBSET_SIZE, SUBSETS = 1000, 100  # of KID
SPLITS = 10  # of the Inception Score
NEIGHBORS = 3  # of precision and recall
BLOCK = 4096  # rows of the distance matrix computed at once
TORCHMETRICS = ("metrics", "measuring KID or the Inception Score")  # its extra, and what it is for


def missing_torchmetrics() -> str | None:
    """Why KID and IS cannot be measured; None if they can."""
    try:
        require("torchmetrics", *TORCHMETRICS)
    except UserError as error:
        return str(error).removesuffix(".")
    return None


def kid(samples: Tensor, real: Tensor, seed: int = 0) -> tuple[float, float]:
    """KID (Bińkowski et al., 2018): mean and standard deviation over 100 random pairs of subsets of up to 1,000."""
    kid_module = require("torchmetrics.image.kid", *TORCHMETRICS)
    with warnings.catch_warnings(action="ignore"), _seeded(seed):  # torchmetrics warns about its memory
        subset_size = min(SUBSET_SIZE, len(samples), len(real))
        metric = kid_module.KernelInceptionDistance(nn.Identity(), SUBSETS, subset_size, sync_on_compute=False)
        metric.to(samples.device)
        metric.update(real.to(samples).double(), real=True)
        metric.update(samples.double(), real=False)
        mean, std = metric.compute()
    return float(mean), float(std)


def inception_score(class_scores: Tensor, seed: int = 0) -> tuple[float, float]:
    """IS (Salimans et al., 2016): mean and standard deviation over ten random splits."""
    inception_module = require("torchmetrics.image.inception", *TORCHMETRICS)
    with warnings.catch_warnings(action="ignore"), _seeded(seed):  # torchmetrics warns about its memory
        metric = inception_module.InceptionScore(nn.Identity(), splits=SPLITS, sync_on_compute=False).to(
            class_scores.device
        )
        metric.update(class_scores)
        mean, std = metric.compute()
    return float(mean), float(std)


def precision_recall(samples: Tensor, real: Tensor) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al., 2019).

    Precision: the fraction of samples within the radius of a real feature, its distance to its third nearest neighbour
    among the real ones. Recall: the same with the roles exchanged.
    """
    real = real.to(samples)
    return _covered_fraction(samples, real), _covered_fraction(real, samples)


def _covered_fraction(points: Tensor, centers: Tensor) -> float:
    radius = torch.cat(
        [
            # + 1: the nearest of all is the center itself
            torch.cdist(block, centers).kthvalue(min(NEIGHBORS + 1, len(centers)), dim=1).values
            for block in centers.split(BLOCK)
        ]
    )
    covered = [(torch.cdist(block, centers) <= radius).any(1) for block in points.split(BLOCK)]
    return float(torch.cat(covered).double().mean())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator, which torchmetrics draws from, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
