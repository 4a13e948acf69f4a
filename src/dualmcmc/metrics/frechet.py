"""The Fréchet distance between two sets of vectors, each taken as a Gaussian.

d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))  (Dowson and Landau, 1982). On Inception features
this is FID; on raw pixels it is a yardstick for tiny images, where Inception has nothing to say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc.crew import Crew


class Moments:
    """Mean and covariance of vectors that come in parts, in double precision: memory is one matrix."""

    def __init__(self, dimension: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self._sum = torch.zeros(dimension, dtype=torch.float64, device=device)
        self._products = torch.zeros(dimension, dimension, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Those of the rows of (N, D)."""
        moments = cls(rows.shape[1], rows.device)
        moments.add(rows)
        return moments

    @classmethod
    def known(cls, count: int, mean: Tensor, covariance: Tensor) -> Moments:
        """Moments worked out before."""
        moments = cls(len(mean), mean.device)
        moments.count = count
        moments._sum = mean.double() * count
        moments._products = covariance.double() * (count - 1) + torch.outer(moments._sum, mean.double())
        return moments

    def add(self, rows: Tensor) -> None:
        """Take in the rows of (N, D)."""
        rows = rows.to(self._sum)
        self.count += len(rows)
        self._sum += rows.sum(0)
        self._products.addmm_(rows.T, rows)

    def join(self, crew: Crew) -> None:
        """Take in what the other processes have."""
        self.count = sum(crew.gather(self.count))
        crew.sum_(self._sum)
        crew.sum_(self._products)

    @property
    def mean(self) -> Tensor:
        """(D,)."""
        return self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """(D, D), with N - 1 in the denominator, as FID has it."""
        if self.count < 2:
            raise ValueError(f"a covariance needs two vectors or more, not {self.count}")
        return (self._products - torch.outer(self._sum, self.mean)) / (self.count - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Between two Gaussians with these moments."""
    mean_a, mean_b = a.mean, b.mean.to(a.mean)
    cov_a, cov_b = a.covariance, b.covariance.to(a.mean)
    # tr (C1 C2)^(1/2) = tr (R C2 R)^(1/2) with R = C1^(1/2); the latter is symmetric.
    root = _symmetric_root(cov_a)
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    return float(((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross).clamp(min=0))


def pixel_frechet_distance(a: Tensor, b: Tensor) -> float:
    """Between two sets of byte images (N, C, H, W), on pixels in [0, 1]."""
    return frechet_distance(*(Moments.of(images.cpu().flatten(1).double() / 255) for images in (a, b)))


def _symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
