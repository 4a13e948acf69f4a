"""Metrics of outlier detection by a score; a higher score means more of an outlier."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def detection(in_distribution: Tensor, outliers: Tensor) -> dict[str, float]:
    """AUROC, AUPR with either class as the positive one, and FPR@95, from the scores of both classes.

    FPR@95: the fraction of outliers accepted at the threshold that accepts 95 % of the in-distribution images.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    a, b = (scores.detach().cpu().double().numpy() for scores in (in_distribution, outliers))
    scores, is_outlier = np.concatenate([a, b]), np.repeat([0, 1], [len(a), len(b)])
    threshold = np.quantile(a, 0.95, method="inverted_cdf")  # the smallest score that 95 % of `a` do not exceed
    return {
        "auroc": float(roc_auc_score(is_outlier, scores)),
        "aupr_outliers": float(average_precision_score(is_outlier, scores)),
        "aupr_in_distribution": float(average_precision_score(1 - is_outlier, -scores)),
        "fpr_at_95_tpr": float((b <= threshold).mean()),
    }
