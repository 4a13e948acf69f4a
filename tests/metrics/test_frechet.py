import numpy as np
import pytest
import scipy.linalg
import torch

from dualmcmc.metrics.frechet import frechet_distance, pixel_frechet_distance


def test_against_the_definition_with_scipys_matrix_root():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(300, 6)) @ rng.normal(size=(6, 6)) + 1
    b = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6))
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(ca @ cb).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)
    assert frechet_distance(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, rel=1e-9)


def test_known_values():
    a = torch.randn(500, 4, dtype=torch.float64)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(a, a + 2) == pytest.approx(16, rel=1e-9)  # 4 numbers, 2 apart
    assert frechet_distance(a, 3 * a) == pytest.approx(
        float(4 * a.mean(0).square().sum() + 4 * torch.cov(a.T).trace()), rel=1e-9
    )


def test_singular_covariances():
    a = torch.randn(50, 3, dtype=torch.float64)
    padded = torch.cat([a, torch.zeros(50, 5)], 1)  # pixels that never change
    assert frechet_distance(padded, padded + 1) == pytest.approx(8, rel=1e-6)


def test_pixels_are_in_0_1():
    black, white = torch.zeros(9, 1, 2, 2, dtype=torch.uint8), torch.full((9, 1, 2, 2), 255, dtype=torch.uint8)
    assert pixel_frechet_distance(black, white) == pytest.approx(4)
