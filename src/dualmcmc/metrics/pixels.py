"""How alike two images are: MSE, PSNR and SSIM, one number an image."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW, SIGMA = 11, 1.5  # SSIM's Gaussian window
SMALL_WINDOW = 7  # flat, for images the other does not fit into
C1, C2 = 0.01**2, 0.03**2  # SSIM's constants, for pixels in [0, 1]


def squared_errors(a: Tensor, b: Tensor) -> Tensor:
    """(N,): mean over the pixels of (a - b)^2."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """(N,) in decibel, of images in [-1, 1], values outside cut off; infinite for equal ones."""
    return 10 * torch.log10(1 / squared_errors(_unit(a), _unit(b)))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """(N,): structural similarity of images in [-1, 1], values outside cut off (Wang et al., 2004).

    With a Gaussian window of 11x11 (sigma 1.5), over the places where it fits, channels averaged; images
    smaller than that get a flat window of 7x7. Both as scikit-image has them with use_sample_covariance=False.
    """
    a, b = _unit(a), _unit(b)
    down, across = (_window(size).to(a) for size in a.shape[2:])

    def local_mean(x: Tensor) -> Tensor:
        return down @ x @ across.T  # the window is a product, so two small products of matrices do it

    mean_a, mean_b = local_mean(a), local_mean(b)
    variances = local_mean(a * a) - mean_a**2 + local_mean(b * b) - mean_b**2
    covariance = local_mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + C1) / (mean_a**2 + mean_b**2 + C1)
    return (luminance * (2 * covariance + C2) / (variances + C2)).flatten(1).mean(1)


def _window(size: int) -> Tensor:
    """(places, size): each row has the window's weights at one place."""
    width = WINDOW if size >= WINDOW else SMALL_WINDOW
    offsets = torch.arange(width, dtype=torch.float64) - width // 2
    weights = torch.exp(-0.5 * (offsets / SIGMA) ** 2) if width == WINDOW else torch.ones(width, dtype=torch.float64)
    table = torch.zeros(size - width + 1, size, dtype=torch.float64)
    for place in range(len(table)):
        table[place, place : place + width] = weights / weights.sum()
    return table


def _unit(x: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], in double precision: on GPUs single precision would be less than it says."""
    return (x.double().clamp(-1, 1) + 1) / 2
