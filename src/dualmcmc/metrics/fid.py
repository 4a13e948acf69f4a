"""The Fréchet distance between two sets of vectors, each modelled as a Gaussian.

d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))  (Dowson and Landau, 1982). On Inception features this is FID. On raw
pixels it compares tiny images, for which Inception features mean little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Moments:
    """Mean and covariance of vectors, accumulated batch by batch in float64; memory does not grow with their number."""

    def __init__(self, dimension: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self._sum = torch.zeros(dimension, dtype=torch.float64, device=device)
        self._products = torch.zeros(dimension, dimension, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """The moments of the rows of (N, D)."""
        moments = cls(rows.shape[1], rows.device)
        moments.add(rows)
        return moments

    @classmethod
    def from_statistics(cls, count: int, mean: Tensor, covariance: Tensor) -> Moments:
        """Moments with a given mean and covariance."""
        moments = cls(len(mean), mean.device)
        moments.count = count
        moments._sum = mean.double() * count
        moments._products = covariance.double() * (count - 1) + torch.outer(moments._sum, mean.double())
        return moments

    def add(self, rows: Tensor) -> None:
        """Add the rows of (N, D)."""
        rows = rows.to(self._sum)
        self.count += len(rows)
        self._sum += rows.sum(0)
        self._products.addmm_(rows.T, rows)

    def corrected(self, exact: Moments, approximate: Moments) -> Moments:
        """These moments of approximate vectors, corrected by what is known of some: their exact moments, and theirs.

        The difference is extrapolated to all (control variates): unbiased, with little variance if errors are small.
        """
        if exact.count != approximate.count:
            raise ValueError(f"{exact.count} exact vectors cannot correct {approximate.count}")
        factor, result = self.count / exact.count, Moments(len(self._sum), self._sum.device)
        result.count = self.count
        result._sum = self._sum + factor * (exact._sum - approximate._sum)
        result._products = self._products + factor * (exact._products - approximate._products)
        return result

    def to(self, device: torch.device) -> Moments:
        """The same moments on a device."""
        self._sum, self._products = self._sum.to(device), self._products.to(device)
        return self

    def all_reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Combine the moments of all processes; `sum_over_ranks` sums a tensor over them."""
        count = torch.tensor(float(self.count), dtype=torch.float64, device=self._sum.device)
        self.count = int(sum_over_ranks(count))
        self._sum, self._products = sum_over_ranks(self._sum), sum_over_ranks(self._products)

    @property
    def mean(self) -> Tensor:
        """(D,)."""
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """(D, D), with N - 1 in the denominator, as in FID."""
        if self.count < 2:
            raise ValueError(f"a covariance needs at least two vectors, not {self.count}")
        return (self._products - torch.outer(self._sum, self.mean)) / (self.count - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """The squared distance between two Gaussians with these moments."""
    mean_a, mean_b = a.mean, b.mean.to(a.mean)
    cov_a, cov_b = a.covariance, b.covariance.to(a.mean)
    # tr (C1 C2)^(1/2) = tr (R^T C1 R)^(1/2) with C2 = R R^T; R^T C1 R is symmetric.
    factor = _factor(cov_b)
    cross = torch.linalg.eigvalsh(factor.T @ cov_a @ factor).clamp(min=0).sqrt().sum()
    return float(((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross).clamp(min=0))


def pixel_frechet_distance(a: Tensor, b: Tensor) -> float:
    """Between two sets of uint8 images (N, C, H, W), on pixels scaled to [0, 1]."""
    return frechet_distance(*(Moments.of(images.cpu().flatten(1).double() / 255) for images in (a, b)))


def _factor(matrix: Tensor) -> Tensor:
    """R with R R^T = matrix."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed:
        return factor
    values, vectors = torch.linalg.eigh(matrix)  # slower, but the matrix may be singular: of few vectors, for example
    return vectors * values.clamp(min=0).sqrt()
