import numpy as np
import pytest
import scipy.linalg
import torch

from dualmcmc.metrics.fid import Moments, frechet_distance, pixel_frechet_distance


def distance(a, b):
    return frechet_distance(Moments.of(a), Moments.of(b))


def test_against_definition():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6)) + 1
    b = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6))
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(ca @ cb).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)
    assert distance(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, rel=1e-9)


def test_known_values():
    a = torch.randn(500, 4, dtype=torch.float64)
    assert distance(a, a) == pytest.approx(0, abs=1e-9)
    assert distance(a, a + 2) == pytest.approx(16, rel=1e-9)  # 4 dimensions, 2 apart each
    assert distance(a, 3 * a) == pytest.approx(
        float(4 * a.mean(0).square().sum() + 4 * torch.cov(a.T).trace()), rel=1e-9
    )


def test_singular_covariances():
    a = torch.randn(50, 3, dtype=torch.float64)
    padded = torch.cat([a, torch.zeros(50, 5)], 1)  # constant pixels
    assert distance(padded, padded + 1) == pytest.approx(8, rel=1e-6)


def test_pixel_distance_scales_pixels_to_0_1():
    black, white = torch.zeros(9, 1, 2, 2, dtype=torch.uint8), torch.full((9, 1, 2, 2), 255, dtype=torch.uint8)
    assert pixel_frechet_distance(black, white) == pytest.approx(4)


def test_moments_do_not_depend_on_batches():
    rows = torch.randn(1000, 5, dtype=torch.float64) * 3 + 40
    whole = Moments.of(rows)
    for size in (1, 7, 333, 1000):
        parts = Moments(5)
        for part in rows.split(size):
            parts.add(part)
        assert parts.count == 1000
        assert torch.allclose(parts.mean, rows.mean(0), rtol=1e-12)
        assert torch.allclose(parts.covariance, torch.cov(rows.T), rtol=1e-10)
        assert frechet_distance(parts, whole) < 1e-9


def test_moments_from_statistics():
    moments = Moments.of(torch.randn(50, 4) + 3)
    again = Moments.from_statistics(moments.count, moments.mean, moments.covariance)
    assert torch.allclose(again.covariance, moments.covariance, rtol=1e-10)
    again.add(torch.zeros(1, 4))
    moments.add(torch.zeros(1, 4))
    assert torch.allclose(again.covariance, moments.covariance, rtol=1e-10)
    with pytest.raises(ValueError, match="at least two vectors"):
        _ = Moments.of(torch.zeros(1, 4)).covariance


def test_correction_needs_the_same_vectors():
    rows = torch.randn(10, 3)
    with pytest.raises(ValueError, match="4 exact vectors cannot correct 5"):
        Moments.of(rows).corrected(Moments.of(rows[:4]), Moments.of(rows[:5]))
