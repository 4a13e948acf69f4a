import numpy as np
import pytest
import torch

from dualmcmc.metrics.kernel import inception_score, kernel_distance, precision_recall


def polynomial_mmd(x, y):
    """KID's estimate from its definition: the unbiased squared MMD with the kernel (x.y / d + 1)^3."""
    d, m, n = x.shape[1], len(x), len(y)
    xx, yy, xy = ((a @ b.T / d + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - np.trace(xx)) / (m * (m - 1)) + (yy.sum() - np.trace(yy)) / (n * (n - 1))
    return within - 2 * xy.mean()


def test_kid_against_the_definition():
    a, b = torch.randn(400, 6), 1.3 * torch.randn(400, 6) + 0.5
    mean, deviation = kernel_distance(a, b)
    expected = polynomial_mmd(a.double().numpy(), b.double().numpy())  # with as few, every subset is the whole set
    assert mean == pytest.approx(expected, rel=1e-6)
    assert deviation == pytest.approx(0, abs=1e-9)


def test_kid_on_subsets_is_close_repeatable_and_leaves_the_global_stream_alone():
    a, b = torch.randn(3000, 4), torch.randn(2500, 4) + 0.5
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = kernel_distance(a, b, seed=1)
    inception_score(a)
    assert torch.equal(before, torch.get_rng_state())
    assert first == kernel_distance(a, b, seed=1)
    assert first != kernel_distance(a, b, seed=2)
    assert first[0] == pytest.approx(polynomial_mmd(a.double().numpy(), b.double().numpy()), rel=0.1)
    assert first[1] > 0


def test_inception_score_against_the_definition():
    scores = torch.randn(100, 7, dtype=torch.float64) * 3
    mean, deviation = inception_score(scores, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        order = torch.randperm(100)
    p = np.exp(scores[order].numpy())
    p /= p.sum(1, keepdims=True)
    parts = [np.exp((q * np.log(q / q.mean(0))).sum(1).mean()) for q in np.split(p, 10)]
    assert mean == pytest.approx(np.mean(parts), rel=1e-9)
    assert deviation == pytest.approx(np.std(parts, ddof=1), rel=1e-6)
    assert inception_score(torch.zeros(50, 7))[0] == pytest.approx(1)  # nothing told apart


def test_precision_and_recall_against_a_loop():
    rng = np.random.default_rng(0)
    real, samples = rng.normal(size=(60, 3)), 0.6 * rng.normal(size=(45, 3)) + 0.5

    def covered(points, centres):
        hits = 0
        for point in points:
            for centre in centres:
                reach = sorted(np.linalg.norm(centres - centre, axis=1))[3]  # 0 is itself
                if np.linalg.norm(point - centre) <= reach:
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
