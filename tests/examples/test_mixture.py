"""The plane example learns, and its yardsticks are right."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

spec = importlib.util.spec_from_file_location("mixture", Path(__file__).parents[2] / "examples" / "mixture.py")
mixture = importlib.util.module_from_spec(spec)
sys.modules["mixture"] = mixture  # dataclasses look their module up
spec.loader.exec_module(mixture)


class Exact(torch.nn.Module):
    def forward(self, x):
        return 3.0 - mixture.log_data_density(x)  # any constant: it is normalised away


def test_the_integrals():
    points, area = mixture.grid()
    assert float(mixture.log_data_density(points).exp().sum() * area) == pytest.approx(1, abs=1e-4)
    assert mixture.kl_to_data(Exact()) == pytest.approx(0, abs=1e-4)
    assert torch.allclose(mixture.mode_shares(Exact()), torch.full((mixture.MODES,), 1 / mixture.MODES), atol=2e-3)
    draws = mixture.draw(20_000, torch.Generator().manual_seed(0))
    wide = torch.distributions.Normal(0.0, 2.0)
    by_samples = float((mixture.log_data_density(draws) - wide.log_prob(draws).sum(1)).mean())

    class Wide(torch.nn.Module):
        def forward(self, x):
            return x.square().sum(1) / 8

    assert mixture.kl_to_data(Wide()) == pytest.approx(by_samples, abs=0.05)


def test_learning_lowers_the_divergence_and_keeps_every_mode(tmp_path, monkeypatch):
    monkeypatch.setitem(mixture.RATES, "energy", 1e-3)  # rougher, but quick
    result = mixture.learn(iterations=400, seed=0, every=400)
    assert result.kl[-1] < 0.6 * result.kl[0]
    shares = mixture.mode_shares(result.trio.energy)
    assert shares.min() > 0.3 / mixture.MODES
    assert math.isclose(float(shares.sum()), 1, abs_tol=1e-3)
    mixture.figure(result, tmp_path / "mixture.png")
    assert (tmp_path / "mixture.png").stat().st_size > 10_000
