import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from dualmcmc.metrics.detection import detection


def average_precision(wanted, rest):
    """Precision at each threshold, weighted by the recall it adds."""
    total, recall = 0.0, 0.0
    for threshold in sorted({*wanted, *rest}, reverse=True):
        hits, false = (wanted >= threshold).sum(), (rest >= threshold).sum()
        total += (hits / len(wanted) - recall) * hits / (hits + false)
        recall = hits / len(wanted)
    return total


@pytest.mark.parametrize(("shift", "round_to"), [(0.0, None), (1.0, None), (-2.0, None), (0.5, 0)])
def test_against_counting_pairs_and_scikit_learn(shift, round_to):
    rng = np.random.default_rng(0)
    known, others = rng.normal(size=300), rng.normal(size=170) * 1.5 + shift
    if round_to is not None:
        known, others = known.round(round_to), others.round(round_to)  # many equal scores
    found = detection(torch.from_numpy(known), torch.from_numpy(others))
    pairs = (others[:, None] > known[None]) + 0.5 * (others[:, None] == known[None])
    assert found["auroc"] == pytest.approx(pairs.mean())
    labels, scores = np.repeat([0, 1], [300, 170]), np.concatenate([known, others])
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores))
    assert found["aupr_outliers"] == pytest.approx(average_precision(others, known))
    assert found["aupr_known"] == pytest.approx(average_precision(-known, -others))
    wrong, right, _ = roc_curve(1 - labels, -scores, drop_intermediate=False)  # accepting the known
    assert found["fpr95"] == pytest.approx(wrong[right >= 0.95].min(), abs=1e-12)


def test_known_values():
    low, high = torch.arange(100.0), torch.arange(200.0, 300.0)
    assert detection(low, high) == {"auroc": 1, "aupr_outliers": 1, "aupr_known": 1, "fpr95": 0}
    assert detection(high, low)["auroc"] == 0
    assert detection(high, low)["fpr95"] == 1
    assert detection(low, low)["auroc"] == 0.5
    twenty = torch.arange(20.0)  # 19 of them, 95 %, are not above 18
    assert detection(twenty, torch.tensor([18.0, 18.01]))["fpr95"] == 0.5
