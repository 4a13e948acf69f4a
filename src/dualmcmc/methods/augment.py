"""Random transformations of the images that E sees, so that it memorises the training set less.

Modelled on adaptive discriminator augmentation (Karras et al., *Training generative adversarial networks with limited
data*, 2020), with a given probability and fewer transformations: mirroring, quarter turns, shifts, zoom, stretch,
brightness, contrast, hue and saturation. E's loss compares transformed data with transformed samples, and the x-chain
follows the gradient of E at transformed images. As long as each transformation is left out often enough, the two agree
only if data and samples do, so that G does not learn the transformations.

An image is multiplied by one matrix for its rows, one for its columns and one for its colours. Gradients are therefore
matrix products, which are deterministic on GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualmcmc.nets.frozen import frozen
from dualmcmc.rng import RandomSource, rand, randn

# Standard deviations; the largest shift by whole pixels is SHIFT too.
SHIFT = 0.125  # of the image's side
LOG_ZOOM = LOG_STRETCH = 0.2 * math.log(2)
BRIGHTNESS = 0.2
LOG_CONTRAST = 0.5 * math.log(2)
LOG_SATURATION = math.log(2)


class Augmentation(NamedTuple):
    """One transformation per image: transposition, x -> rows x columns^T, brightness, colour matrix."""

    transposed: Tensor  # (B, 1, 1, 1), boolean
    rows: Tensor  # (B, 1, H, H)
    columns: Tensor  # (B, 1, W, W)
    brightness: Tensor  # (B, 1, 1, 1)
    colour: Tensor  # (B, C, C)

    def __call__(self, x: Tensor) -> Tensor:
        """Images (B, C, H, W), transformed."""
        x = torch.where(self.transposed, x.mT, x)
        x = self.rows @ x @ self.columns.mT + self.brightness
        return (self.colour @ x.flatten(2)).unflatten(2, x.shape[2:])


def draw_augmentation(x: Tensor, probability: float, rng: RandomSource) -> Augmentation:
    """A transformation for each of the square images x (B, C, H, H); each part of it applies with this probability."""
    if x.ndim != 4 or x.shape[2] != x.shape[3]:
        raise ValueError(f"energy_augment needs square images (B, C, H, H), not {tuple(x.shape)}")
    count, channels, side, _ = x.shape
    applied = (rand((count, 10), x, rng) < probability).unbind(1)
    mirror, turn, row_pixels, column_pixels, hue = rand((count, 5), x, rng).unbind(1)
    zoom, stretch, row_shift, column_shift, brightness, contrast, saturation = randn((count, 7), x, rng).unbind(1)

    def keep(part: int, value: Tensor) -> Tensor:
        return torch.where(applied[part], value, 0)

    quarter_turns = keep(1, (4 * turn).floor())  # one is a transposition and a mirroring
    flip_rows = _sign(quarter_turns >= 2)
    flip_columns = _sign((quarter_turns == 1) | (quarter_turns == 2)) * _sign(keep(0, mirror) > 0.5)
    zoom, stretch = torch.exp(keep(2, LOG_ZOOM * zoom)), torch.exp(keep(3, LOG_STRETCH * stretch))
    shift_rows, shift_columns = (
        keep(4, (SHIFT * side * (2 * pixels - 1)).round()) + keep(5, SHIFT * side * shift)
        for pixels, shift in ((row_pixels, row_shift), (column_pixels, column_shift))
    )
    colour = _colour_matrix(
        channels,
        torch.exp(keep(7, LOG_CONTRAST * contrast)),
        keep(8, 2 * math.pi * hue),
        torch.exp(keep(9, LOG_SATURATION * saturation)),
    )
    return Augmentation(
        (quarter_turns % 2 == 1)[:, None, None, None],
        _resampling_matrix(side, flip_rows * zoom * stretch, shift_rows)[:, None],
        _resampling_matrix(side, flip_columns * zoom / stretch, shift_columns)[:, None],
        keep(6, BRIGHTNESS * brightness)[:, None, None, None],
        colour,
    )


def _sign(flipped: Tensor) -> Tensor:
    return torch.where(flipped, -1.0, 1.0)


def _resampling_matrix(side: int, scale: Tensor, shift: Tensor) -> Tensor:
    """(B, side, side). Pixel i is read at scale * i + shift, measured from the centre.

    Linear interpolation, reflection at the edges.
    """
    pixels = torch.arange(side, device=scale.device, dtype=scale.dtype)
    centre = (side - 1) / 2
    position = scale[:, None] * (pixels - centre) + shift[:, None] + centre
    folded = (position + 0.5).remainder(2 * side)  # distance from the first edge, in the image or in its reflection
    position = (torch.minimum(folded, 2 * side - folded) - 0.5).clamp(0, side - 1)
    return (1 - (position[:, :, None] - pixels).abs()).clamp(min=0)


def _colour_matrix(channels: int, contrast: Tensor, hue: Tensor, saturation: Tensor) -> Tensor:
    """(B, C, C): contrast; for RGB also a rotation about the grey axis, and a factor for the distance from it."""
    contrast, hue, saturation = (part[:, None, None] for part in (contrast, hue, saturation))
    identity = torch.eye(channels, device=hue.device, dtype=hue.dtype)
    if channels != 3:
        return contrast * identity
    grey = torch.full_like(identity, 1 / 3)  # projection onto the grey axis
    quarter_turn = (identity.roll(1, 0) - identity.roll(1, 1)) / math.sqrt(3)
    return contrast * (grey + saturation * (hue.cos() * (identity - grey) + hue.sin() * quarter_turn))


class AugmentedEnergy:
    """E at transformed images, for a chain: x -> E(T(x)) with the same T at every step."""

    def __init__(self, energy: Callable[[Tensor], Any], augmentation: Augmentation) -> None:
        self._energy, self._augmentation = energy, augmentation

    def __call__(self, x: Tensor) -> Any:
        """E(T(x))."""
        return self._energy(self._augmentation(x))

    @contextmanager
    def frozen(self) -> Iterator[Callable[[Tensor], Any]]:
        """See `nets.frozen.frozen`."""
        with frozen(self._energy) as energy:
            yield AugmentedEnergy(energy, self._augmentation)
