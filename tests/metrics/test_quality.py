import numpy as np
import pytest
import torch

from dualmcmc.metrics import quality
from dualmcmc.metrics.quality import inception_score, kid, precision_recall


def polynomial_mmd(x, y):
    """The unbiased squared MMD with the kernel (x.y / d + 1)^3."""
    d, m, n = x.shape[1], len(x), len(y)
    xx, yy, xy = ((a @ b.T / d + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - np.trace(xx)) / (m * (m - 1)) + (yy.sum() - np.trace(yy)) / (n * (n - 1))
    return within - 2 * xy.mean()


def test_kid_against_definition():
    a, b = torch.randn(400, 6), 1.3 * torch.randn(400, 6) + 0.5
    mean, std = kid(a, b)
    expected = polynomial_mmd(a.double().numpy(), b.double().numpy())  # every subset is the whole set
    assert mean == pytest.approx(expected, rel=1e-6)
    assert std == pytest.approx(0, abs=1e-9)


def test_kid_of_subsets(monkeypatch):
    """Close to that of all features, repeatable, and without effect on torch's global generator."""
    monkeypatch.setattr(quality, "SUBSETS", 20)
    monkeypatch.setattr(quality, "SUBSET_SIZE", 500)
    a, b = torch.randn(3000, 4), torch.randn(2500, 4) + 0.5
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = kid(a, b, seed=1)
    inception_score(a)
    assert torch.equal(before, torch.get_rng_state())
    assert first == kid(a, b, seed=1)
    assert first != kid(a, b, seed=2)
    assert first[0] == pytest.approx(polynomial_mmd(a.double().numpy(), b.double().numpy()), rel=0.1)
    assert first[1] > 0


def test_features_are_not_gathered_again(monkeypatch):
    """In a distributed job every process has all features already."""

    def sync(*_, **__):
        pytest.fail("gathered from all processes")

    monkeypatch.setattr("torchmetrics.metric.jit_distributed_available", lambda: True)
    monkeypatch.setattr("torchmetrics.metric.Metric._sync_dist", sync)
    kid(torch.randn(20, 4), torch.randn(20, 4))
    inception_score(torch.randn(20, 4))


def test_inception_score_against_definition():
    scores = torch.randn(100, 7, dtype=torch.float64) * 3
    mean, std = inception_score(scores, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        order = torch.randperm(100)
    p = np.exp(scores[order].numpy())
    p /= p.sum(1, keepdims=True)
    parts = [np.exp((q * np.log(q / q.mean(0))).sum(1).mean()) for q in np.split(p, 10)]
    assert mean == pytest.approx(np.mean(parts), rel=1e-9)
    assert std == pytest.approx(np.std(parts, ddof=1), rel=1e-6)
    assert inception_score(torch.zeros(50, 7))[0] == pytest.approx(1)  # all class distributions are equal


def test_precision_and_recall_against_a_loop():
    rng = np.random.default_rng(0)
    real, samples = rng.normal(size=(60, 3)), 0.6 * rng.normal(size=(45, 3)) + 0.5

    def covered(points, centers):
        hits = 0
        for point in points:
            for center in centers:
                radius = sorted(np.linalg.norm(centers - center, axis=1))[3]  # 0 is the center itself
                if np.linalg.norm(point - center) <= radius:
                    hits += 1
                    break
        return hits / len(points)

    precision, recall = precision_recall(torch.from_numpy(samples), torch.from_numpy(real))
    assert precision == pytest.approx(covered(samples, real))
    assert recall == pytest.approx(covered(real, samples))
    assert 0 < recall < precision
    far = torch.from_numpy(samples) + 100
    assert precision_recall(far, torch.from_numpy(real)) == (0, 0)
    assert precision_recall(torch.from_numpy(real), torch.from_numpy(real)) == (1, 1)
