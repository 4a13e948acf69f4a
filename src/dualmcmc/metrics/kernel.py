"""Numbers on whole sets of features that FID's two moments do not show: KID, Inception Score, precision, recall."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SUBSET = 1000  # features in one of KID's estimates
SUBSETS = 100
SPLITS = 10  # of the Inception Score
NEIGHBOURS = 3  # of precision and recall
BLOCK = 4096  # rows of a table of distances worked on at once


def kernel_distance(samples: Tensor, real: Tensor, seed: int = 0) -> tuple[float, float]:
    """KID (Binkowski et al., 2018): mean and standard deviation over 100 pairs of subsets of up to 1,000."""
    from torchmetrics.image.kid import KernelInceptionDistance

    with warnings.catch_warnings(action="ignore"), _seeded(seed):  # it warns that features are kept
        metric = KernelInceptionDistance(nn.Identity(), SUBSETS, min(SUBSET, len(samples), len(real)))
        metric.to(samples.device)
        metric.update(real.to(samples).double(), real=True)
        metric.update(samples.double(), real=False)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def inception_score(class_scores: Tensor, seed: int = 0) -> tuple[float, float]:
    """IS (Salimans et al., 2016): mean and standard deviation over ten parts, in random order."""
    from torchmetrics.image.inception import InceptionScore

    with warnings.catch_warnings(action="ignore"), _seeded(seed):  # it warns that features are kept
        metric = InceptionScore(nn.Identity(), splits=SPLITS).to(class_scores.device)
        metric.update(class_scores)
        mean, deviation = metric.compute()
    return float(mean), float(deviation)


def precision_recall(samples: Tensor, real: Tensor) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al., 2019) with three neighbours.

    Precision: the share of samples that lie within reach of a real feature, its reach being the distance
    to its third neighbour among the real. Recall: the same with the two exchanged.
    """
    real = real.to(samples)
    return _within_reach(samples, real), _within_reach(real, samples)


def _within_reach(points: Tensor, centres: Tensor) -> float:
    reach = torch.cat(
        [
            # the nearest of all is the centre itself
            torch.cdist(block, centres).kthvalue(min(NEIGHBOURS + 1, len(centres)), dim=1).values
            for block in centres.split(BLOCK)
        ]
    )
    inside = [(torch.cdist(block, centres) <= reach).any(1) for block in points.split(BLOCK)]
    return float(torch.cat(inside).double().mean())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """torch's global CPU source, which torchmetrics draws from, seeded for a while; those of GPUs are left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
