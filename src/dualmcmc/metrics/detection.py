"""How well a score tells outliers from what is known: higher must mean more of an outlier."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def detection(known: Tensor, outliers: Tensor) -> dict[str, float]:
    """AUROC, AUPR with either class as the one to find, and FPR@95, of the scores of two sets.

    FPR@95: the share of outliers that pass where 95 % of the known do.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score

    a, b = (scores.detach().cpu().double().numpy() for scores in (known, outliers))
    scores, is_outlier = np.concatenate([a, b]), np.repeat([0, 1], [len(a), len(b)])
    threshold = np.quantile(a, 0.95, method="inverted_cdf")  # the lowest that 95 % of the known do not exceed
    return {
        "auroc": float(roc_auc_score(is_outlier, scores)),
        "aupr_outliers": float(average_precision_score(is_outlier, scores)),
        "aupr_known": float(average_precision_score(1 - is_outlier, -scores)),
        "fpr95": float((b <= threshold).mean()),
    }
