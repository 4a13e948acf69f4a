"""What is hidden from an inpainting: the paper's blocks, or a picture of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.data.images import BadImage, Fit, decode
from dualmcmc.errors import UserError

NAMES = ("M20", "M30", "M40", "R20", "R30", "R40")
PAPER_SIDE = 64  # the image size at which M20 is 20x20
BLOCKS = 8  # a random block has this fraction of the side


def observed(word: str, count: int, size: int, seed: int = 0, first: int = 0) -> Tensor:
    """(count, 1, size, size), true where an image can be seen; for images number `first` and on.

    M20, M30, M40: a centre block of that side at 64x64, and of the same share of the side at other sizes.
    R20, R30, R40: square blocks at random places that hide 20, 30 or 40 % of the pixels, others for each
    image, fixed by the seed. Any other number will do too. Or a picture: what is white (128 and more) is hidden.
    """
    kind = re.fullmatch(r"([MR])(\d{1,2})", word.upper())
    if kind is None:
        return _from_file(Path(word).expanduser(), size).expand(count, 1, size, size)
    number = int(kind[2])
    if kind[1] == "M":
        if not 0 < number < PAPER_SIDE:
            raise UserError(f"--mask {word}: the side of the block is of 64 pixels, so M1 to M{PAPER_SIDE - 1}.")
        side = min(max(1, round(number / PAPER_SIDE * size)), size - 1)  # it hides something, and not all
        top = (size - side) // 2
        mask = torch.ones(1, 1, size, size, dtype=torch.bool)
        mask[..., top : top + side, top : top + side] = False
        return mask.expand(count, 1, size, size)
    if number < 1:
        raise UserError(f"--mask {word}: between 1 and 99 % of the pixels can be hidden.")
    return torch.stack([_random_blocks(number / 100, size, seed, first + index) for index in range(count)])


def _random_blocks(share: float, size: int, seed: int, index: int) -> Tensor:
    """Blocks until the share is reached; of the last one only as many rows and pixels as are needed."""
    source = np.random.default_rng(rng.derive(seed, rng.Stream.MASKS, index))
    side, wanted = max(1, round(size / BLOCKS)), round(share * size * size)
    hidden = np.zeros((size, size), bool)
    while (missing := wanted - hidden.sum()) > 0:
        top, left = source.integers(0, size - side + 1, 2)
        block = hidden[top : top + side, left : left + side]
        fresh = np.flatnonzero(~block)[:missing]
        block[np.unravel_index(fresh, block.shape)] = True
    return torch.from_numpy(~hidden)[None]


def _from_file(path: Path, size: int) -> Tensor:
    if not path.is_file():
        raise UserError(
            f"--mask {path}: use {', '.join(NAMES)}, or a picture whose white hides; there is no such file."
        )
    fit = Fit(size, 1, "none", "box")
    try:
        content = path.read_bytes()
        height, width, _ = decode(content, Fit()).shape
        if height != width:
            raise BadImage(f"it is {width}x{height}, and must be square, as the images are")
        pixels = decode(content, fit)
    except (OSError, BadImage) as error:
        raise UserError(f"--mask {path} cannot be read as a picture: {error}.") from None
    mask = torch.from_numpy(pixels[..., 0] < 128)
    if mask.all() or not mask.any():
        raise UserError(
            f"--mask {path} hides {'nothing' if mask.all() else 'everything'}: white is hidden, black is seen."
        )
    return mask[None, None]
