import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from dualmcmc.metrics.detection import detection


def average_precision(positive, negative):
    """Precision at each threshold, weighted by the recall it adds."""
    total, recall = 0.0, 0.0
    for threshold in sorted({*positive, *negative}, reverse=True):
        hits, false_alarms = (positive >= threshold).sum(), (negative >= threshold).sum()
        total += (hits / len(positive) - recall) * hits / (hits + false_alarms)
        recall = hits / len(positive)
    return total


@pytest.mark.parametrize(("shift", "decimals"), [(0.0, None), (1.0, None), (-2.0, None), (0.5, 0)])
def test_against_definitions(shift, decimals):
    rng = np.random.default_rng(0)
    normal, others = rng.normal(size=300), rng.normal(size=170) * 1.5 + shift
    if decimals is not None:
        normal, others = normal.round(decimals), others.round(decimals)  # many ties
    result = detection(torch.from_numpy(normal), torch.from_numpy(others))
    pairs = (others[:, None] > normal[None]) + 0.5 * (others[:, None] == normal[None])
    assert result["auroc"] == pytest.approx(pairs.mean())
    labels, scores = np.repeat([0, 1], [300, 170]), np.concatenate([normal, others])
    assert result["auroc"] == pytest.approx(roc_auc_score(labels, scores))
    assert result["aupr_outliers"] == pytest.approx(average_precision(others, normal))
    assert result["aupr_in_distribution"] == pytest.approx(average_precision(-normal, -others))
    fpr, tpr, _ = roc_curve(1 - labels, -scores, drop_intermediate=False)  # positive: in distribution
    assert result["fpr_at_95_tpr"] == pytest.approx(fpr[tpr >= 0.95].min(), abs=1e-12)


def test_known_values():
    low, high = torch.arange(100.0), torch.arange(200.0, 300.0)
    perfect = {"auroc": 1, "aupr_outliers": 1, "aupr_in_distribution": 1, "fpr_at_95_tpr": 0}
    assert detection(low, high) == perfect
    assert detection(high, low)["auroc"] == 0
    assert detection(high, low)["fpr_at_95_tpr"] == 1
    assert detection(low, low)["auroc"] == 0.5
    twenty = torch.arange(20.0)  # 19 of them, 95 %, are at most 18
    assert detection(twenty, torch.tensor([18.0, 18.01]))["fpr_at_95_tpr"] == 0.5
