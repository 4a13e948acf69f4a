"""Images moved at random, so that a network cannot learn each of them by heart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dualmcmc.rng import Source, integers


def shifted(images: Tensor, most: int, rng: Source) -> Tensor:
    """Images (B, C, H, W), each moved by up to `most` pixels along both axes; all its channels alike.

    What comes in at an edge mirrors what is there.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, [most] * 4, mode="reflect").movedim(1, -1)
    first = integers((count, 2), 2 * most + 1, images, rng)
    row, column = (
        first[:, axis, None] + torch.arange(n, device=images.device) for axis, n in enumerate((height, width))
    )
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded[each, row[:, :, None], column[:, None, :]].movedim(-1, 1)
