"""Against closed forms for autoregressive chains, and a plain restatement of the definitions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dualmcmc.metrics.chains import effective_sample_size, r_hat


def autoregressive(phi, draws, chains, seed=0):
    """x_t = phi x_(t-1) + noise, started in its stationary distribution, of variance 1."""
    rng = np.random.default_rng(seed)
    x = np.empty((draws, chains))
    x[0] = rng.normal(size=chains)
    for t in range(1, draws):
        x[t] = phi * x[t - 1] + math.sqrt(1 - phi**2) * rng.normal(size=chains)
    return torch.from_numpy(x)


@pytest.mark.parametrize("phi", [-0.4, 0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregressive_chain(phi):
    values = autoregressive(phi, 20_000, 8)
    assert effective_sample_size(values) == pytest.approx(values.numel() * (1 - phi) / (1 + phi), rel=0.06)


def test_chains_that_disagree_count_for_little():
    values = autoregressive(0.5, 2000, 4)
    together, apart = effective_sample_size(values), effective_sample_size(values + 3 * torch.arange(4))
    assert apart < 20 < together / 50


def test_antithetic_chains_count_for_more_than_their_draws():
    values = torch.tensor([1.0, -1.0]).repeat(50)[:, None] + 0.01 * autoregressive(0, 100, 3).float()
    ess = effective_sample_size(values)
    assert values.numel() < ess <= values.numel() * math.log10(values.numel()) * 1.001


def restated_r_hat(values):
    """Vehtari et al. (2021), sections 2 and 4, in NumPy and SciPy."""
    half = len(values) // 2
    parts = np.concatenate([values[:half], values[len(values) - half :]], axis=1)

    def split_r_hat(x):
        scores = stats.norm.ppf((stats.rankdata(x).reshape(x.shape) - 0.375) / (x.size + 0.25))
        n = len(scores)
        between, within = n * scores.mean(0).var(ddof=1), scores.var(0, ddof=1).mean()
        return math.sqrt(((n - 1) / n * within + between / n) / within)

    folded = np.abs(parts - np.sort(parts, axis=None)[(parts.size - 1) // 2])
    return max(split_r_hat(parts), split_r_hat(folded))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("draws", [9, 200])
def test_r_hat_is_the_published_definition(offset, draws):
    values = autoregressive(0.3, draws, 4) + offset * torch.arange(4)
    values[:5] = values[:5].round()  # ties
    assert r_hat(values) == pytest.approx(restated_r_hat(values.numpy()), abs=1e-10)


def test_r_hat_shows_what_has_not_converged():
    same = autoregressive(0.3, 4000, 4)
    assert r_hat(same) < 1.01
    assert r_hat(same + torch.tensor([0.0, 0, 0, 1])) > 1.05  # one chain is elsewhere
    assert r_hat(same * torch.tensor([1.0, 1, 1, 3])) > 1.05  # one has another scale
    assert r_hat(same + torch.linspace(0, 2, 4000)[:, None]) > 1.05  # all drift


def test_constant_values_have_neither():
    assert math.isnan(effective_sample_size(torch.ones(20, 3)))
    assert math.isnan(r_hat(torch.ones(20, 3)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_diverged_chains_have_neither(value):
    values = autoregressive(0.3, 100, 4)
    values[70, 2] = value  # a rank of its own would look harmless
    assert math.isnan(effective_sample_size(values))
    assert math.isnan(r_hat(values))


@pytest.mark.parametrize("shape", [(7, 4), (100,)])
def test_too_few_draws(shape):
    with pytest.raises(ValueError, match=r"\(draws, chains\) with at least 8 draws"):
        r_hat(torch.zeros(shape))
