"""Convergence of Markov chains: effective sample size and R-hat of one quantity, such as the energy.

Values are (draws, chains). Both halves of a chain count as chains of their own, so that a trend within a chain shows
as well as a difference between chains (Vehtari et al., *Rank-normalization, folding, and localization: an improved
R-hat*, 2021).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MIN_DRAWS = 8  # per chain; with fewer, half a chain has no autocorrelation to speak of


def effective_sample_size(values: Tensor) -> float:
    """Number of independent draws whose mean has the variance of the mean of `values`.

    NaN if they are constant or not all finite.

    Autocorrelations are summed up to the first negative sum of two neighbours, and made monotone (Geyer, 1992).
    """
    chains = _split(values)
    if not torch.isfinite(chains).all():
        return math.nan
    draws, count = chains.shape
    covariances = _autocovariance(chains).mean(1)
    within = covariances[0] * draws / (draws - 1)
    pooled = _pooled_variance(chains)
    if pooled == 0:
        return math.nan
    correlations = 1 - (within - covariances * draws / (draws - 1)) / pooled
    correlations[0] = 1
    pairs = correlations[: 2 * (draws // 2)].unflatten(0, (-1, 2)).sum(1)
    negative = (pairs < 0).nonzero()
    pairs = pairs[: int(negative[0])] if len(negative) else pairs
    time = float(2 * pairs.cummin(0).values.sum() - 1)  # the integrated autocorrelation time
    total = draws * count
    return total / max(time, 1 / math.log10(total))  # antithetic chains: not more than total log10(total)


def r_hat(values: Tensor) -> float:
    """Rank-normalised split R-hat: near 1 if all chains sample the same distribution; above 1.01 they do not.

    The larger of the values for location and, from distances to the median, for scale. NaN if they are constant or not
    all finite; infinite if each chain is constant, at a value of its own.
    """
    chains = _split(values)
    if not torch.isfinite(chains).all():  # ranks would hide it
        return math.nan
    folded = (chains - chains.median()).abs()
    return max(_basic_r_hat(_normal_scores(chains)), _basic_r_hat(_normal_scores(folded)))


def _split(values: Tensor) -> Tensor:
    """Both halves of each chain as chains, in double precision; an odd draw in the middle is left out."""
    if values.ndim != 2 or len(values) < MIN_DRAWS:
        raise ValueError(f"values must be (draws, chains) with at least {MIN_DRAWS} draws, not {tuple(values.shape)}")
    half = len(values) // 2
    return torch.cat([values[:half], values[-half:]], 1).double()


def _autocovariance(chains: Tensor) -> Tensor:
    """Of each chain, at lags 0, 1, ...: (draws, chains), with `draws` in the denominator."""
    draws = len(chains)
    centered = chains - chains.mean(0)
    spectrum = torch.fft.rfft(centered, n=2 * draws, dim=0)  # padded: no lag wraps around
    return torch.fft.irfft(spectrum.abs().square(), n=2 * draws, dim=0)[:draws] / draws


def _pooled_variance(chains: Tensor) -> Tensor:
    """The estimate of the variance that is too large until the chains have mixed."""
    draws = len(chains)
    return chains.var(0).mean() * (draws - 1) / draws + chains.mean(0).var()


def _basic_r_hat(chains: Tensor) -> float:
    return float((_pooled_variance(chains) / chains.var(0).mean()).sqrt())


def _normal_scores(chains: Tensor) -> Tensor:
    """Each value replaced by the normal quantile of its rank among all; ties share their mean rank."""
    _, inverse, counts = chains.flatten().unique(return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0) - (counts - 1) / 2
    ranks = mean_rank.double()[inverse].reshape(chains.shape)
    return torch.special.ndtri((ranks - 3 / 8) / (chains.numel() + 1 / 4))
