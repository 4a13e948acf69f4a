"""The Fréchet distance between two sets of vectors, each taken as a Gaussian.

d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))  (Dowson and Landau, 1982). On Inception features
this is FID; on raw pixels it is a yardstick for tiny images, where Inception has nothing to say.
"""

from __future__ import annotations

import torch
from torch import Tensor


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Between the rows of a (N, D) and b (M, D), in double precision."""
    a, b = a.double(), b.double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    # tr (C1 C2)^(1/2) = tr (R C2 R)^(1/2) with R = C1^(1/2); the latter is symmetric.
    root = _symmetric_root(cov_a)
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp(min=0).sqrt().sum()
    means = (a.mean(0) - b.mean(0)).square().sum()
    return float((means + cov_a.trace() + cov_b.trace() - 2 * cross).clamp(min=0))


def pixel_frechet_distance(a: Tensor, b: Tensor) -> float:
    """Between two sets of byte images (N, C, H, W), on pixels in [0, 1]."""
    return frechet_distance(*(images.cpu().flatten(1).double() / 255 for images in (a, b)))


def _symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
