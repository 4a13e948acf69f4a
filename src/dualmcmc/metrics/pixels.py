"""How alike two images are: MSE, PSNR and SSIM, one number an image."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW, SIGMA = 11, 1.5  # SSIM's Gaussian window (Wang et al., 2004)
SMALL_WINDOW = 7  # flat, for images the other does not fit into


def squared_errors(a: Tensor, b: Tensor) -> Tensor:
    """(N,): mean over the pixels of (a - b)^2."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """(N,) in decibel, of images in [-1, 1], values outside cut off; infinite for equal ones."""
    return 10 * torch.log10(1 / squared_errors(_unit(a), _unit(b)))


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """(N,): structural similarity of images in [-1, 1], values outside cut off.

    With a Gaussian window of 11x11 (sigma 1.5), over the places where it fits, channels averaged; images
    smaller than that get a flat window of 7x7. Both as scikit-image has them.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    small = min(a.shape[2:]) < WINDOW
    _, table = structural_similarity_index_measure(
        _unit(a),
        _unit(b),
        gaussian_kernel=not small,
        sigma=SIGMA,
        kernel_size=SMALL_WINDOW,
        reduction="none",
        data_range=1.0,
        return_full_image=True,
    )
    edge = (SMALL_WINDOW if small else WINDOW) // 2
    return table[..., edge:-edge, edge:-edge].flatten(1).mean(1)


def _unit(x: Tensor) -> Tensor:
    """[-1, 1] to [0, 1], in double precision: on GPUs single precision would be less than it says."""
    return (x.double().clamp(-1, 1) + 1) / 2
