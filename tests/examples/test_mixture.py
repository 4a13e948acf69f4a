"""The example on a mixture of Gaussians: its integrals are right, and it learns."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

spec = importlib.util.spec_from_file_location("mixture", Path(__file__).parents[2] / "examples" / "mixture.py")
mixture = importlib.util.module_from_spec(spec)
sys.modules["mixture"] = mixture  # needed by dataclasses
spec.loader.exec_module(mixture)


class Exact(torch.nn.Module):
    def forward(self, x):
        return 3.0 - mixture.log_data_density(x)  # normalisation removes the constant


class Wide(torch.nn.Module):
    def forward(self, x):
        return x.square().sum(1) / 8


def test_integrals():
    points, area = mixture.grid()
    assert float(mixture.log_data_density(points).exp().sum() * area) == pytest.approx(1, abs=1e-4)
    assert mixture.kl_to_data(Exact()) == pytest.approx(0, abs=1e-4)
    weights = mixture.mode_weights(Exact())
    assert torch.allclose(weights, torch.full((mixture.MODES,), 1 / mixture.MODES), atol=2e-3)
    x = mixture.sample_data(20_000, torch.Generator().manual_seed(0))
    log_wide = torch.distributions.Normal(0.0, 2.0).log_prob(x).sum(1)
    estimate = float((mixture.log_data_density(x) - log_wide).mean())
    assert mixture.kl_to_data(Wide()) == pytest.approx(estimate, abs=0.05)


def test_training_lowers_the_divergence_and_covers_every_mode(tmp_path, monkeypatch):
    monkeypatch.setitem(mixture.LEARNING_RATES, "energy", 3e-3)  # coarser, but quick
    monkeypatch.setattr(mixture, "CELLS", 200)
    result = mixture.train(iterations=120, batch=128, every=120)
    assert result.kl[-1] < 0.7 * result.kl[0]
    weights = mixture.mode_weights(result.trio.energy)
    assert weights.min() > 0.3 / mixture.MODES
    assert float(weights.sum()) == pytest.approx(1, abs=1e-3)
    mixture.save_figure(result, tmp_path / "mixture.png")
    assert (tmp_path / "mixture.png").stat().st_size > 10_000


def test_with_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "CELLS", 100)
    monkeypatch.setattr(mixture, "POINTS", 1000)
    result = mixture.train_run(tmp_path / "run", iterations=400)
    assert result.kl[-1] < 0.7 * result.kl[0]
    assert (tmp_path / "run" / "snapshot.safetensors").exists()
