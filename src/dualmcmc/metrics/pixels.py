"""Similarity of image pairs: MSE, PSNR and SSIM, one value per pair."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_PSNR = 54.15  # dB, that of half a grey level: one exact image would make a mean infinite
WINDOW, SIGMA = 11, 1.5  # SSIM's Gaussian window
SMALL_WINDOW = 7  # uniform, for images smaller than WINDOW
C1, C2 = 0.01**2, 0.03**2  # SSIM's constants, for pixels in [0, 1]


def mse(a: Tensor, b: Tensor) -> Tensor:
    """(N,): mean of (a - b)^2 over the pixels."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """(N,) in decibels, of images clamped to [-1, 1]; infinite for equal images."""
    return 10 * torch.log10(1 / mse(_to_unit_range(a), _to_unit_range(b)))


def psnr_of_mse(value: float) -> float:
    """PSNR in decibels of a mean squared error of pixels in [-1, 1], at most `MAX_PSNR`."""
    return min(MAX_PSNR, 10 * math.log10(4 / value)) if value > 0 else MAX_PSNR


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """(N,): structural similarity of images clamped to [-1, 1] (Wang et al., 2004).

    Averaged over channels and over all positions of an 11x11 Gaussian window (sigma 1.5) inside the image; smaller
    images get a uniform 7x7 window. Equals scikit-image's with use_sample_covariance=False.
    """
    a, b = _to_unit_range(a), _to_unit_range(b)
    vertical, horizontal = (_window(size).to(a) for size in a.shape[2:])

    def local_mean(x: Tensor) -> Tensor:
        return vertical @ x @ horizontal.T  # the window is separable

    mean_a, mean_b = local_mean(a), local_mean(b)
    variances = local_mean(a * a) - mean_a**2 + local_mean(b * b) - mean_b**2
    covariance = local_mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
    return (luminance * (2 * covariance + C2) / (variances + C2)).flatten(1).mean(1)


def _window(size: int) -> Tensor:
    """(positions, size): each row contains the window's weights at one position."""
    width = WINDOW if size >= WINDOW else SMALL_WINDOW
    offsets = torch.arange(width, dtype=torch.float64) - width // 2
    weights = torch.exp(-0.5 * (offsets / SIGMA) ** 2) if width == WINDOW else torch.ones(width, dtype=torch.float64)
    table = torch.zeros(size - width + 1, size, dtype=torch.float64)
    for position in range(len(table)):
        table[position, position : position + width] = weights / weights.sum()
    return table


def _to_unit_range(x: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], in float64: float32 products may run as tf32 on GPUs."""
    return (x.double().clamp(-1, 1) + 1) / 2
