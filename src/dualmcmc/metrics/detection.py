"""Metrics of outlier detection by a score; a higher score means more of an outlier."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def detection(in_distribution: Tensor, outliers: Tensor) -> dict[str, float]:
    """AUROC, AUPR with either class as the positive one, and FPR@95, from the scores of both classes.

    FPR@95: the fraction of outliers accepted at the threshold that accepts 95 % of the in-distribution images.
    """
    a, b = (scores.detach().cpu().double().numpy() for scores in (in_distribution, outliers))
    threshold = np.quantile(a, 0.95, method="inverted_cdf")  # the smallest score that 95 % of `a` do not exceed
    return {
        "auroc": _auroc(a, b),
        "aupr_outliers": _average_precision(b, a),
        "aupr_in_distribution": _average_precision(-a, -b),
        "fpr_at_95_tpr": float((b <= threshold).mean()),
    }


def _auroc(negative: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive scores higher than a negative; ties count half."""
    ordered = np.sort(negative)
    below, not_above = (np.searchsorted(ordered, positive, side) for side in ("left", "right"))
    return float((below + not_above).mean() / (2 * len(ordered)))


def _average_precision(positive: np.ndarray, negative: np.ndarray) -> float:
    """Precision at each distinct score, from the highest, weighted by the recall that it adds."""
    thresholds, counts = np.unique(positive, return_counts=True)
    hits = counts[::-1].cumsum()[::-1]  # positives at or above each threshold
    false_alarms = len(negative) - np.searchsorted(np.sort(negative), thresholds, "left")
    return float((counts * (hits / (hits + false_alarms))).sum() / len(positive))
