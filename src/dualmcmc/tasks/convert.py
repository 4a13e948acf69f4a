"""Convert user-supplied samples to what the networks expect: images to (B, C, H, W) floats in [-1, 1].

uint8 pixels are mapped from 0..255; floats must be in [-1, 1] already. Channels may be first or last, a greyscale image
needs no channel axis, and a single image becomes a batch of one. Only PIL images are cropped, resized and converted, as
files are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dualmcmc.config import Data
from dualmcmc.data.images import ImageSpec, UnreadableImage, from_pil
from dualmcmc.data.store import ImageStore, MemoryStore
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, to_uint8

MAX_VALUE = 50  # of floats: a chain may leave [-1, 1], but this far away are pixels from 0 to 255


def as_images(value: Any, cfg: Data) -> Tensor:
    """`value` (a tensor, an array, a PIL image, or a list of those) for a run on images like `cfg`.

    A batch of float tensors is returned as it is, so that gradients reach it.
    """
    if not cfg.is_image:
        return _as_samples(value, cfg.sample_shape)
    if isinstance(value, (list, tuple)):
        if not value:
            raise UserError("there are no images in an empty list.")
        return torch.cat([as_images(item, cfg) for item in value])
    if isinstance(value, Image.Image):
        try:
            value = from_pil(value, ImageSpec.from_config(cfg))
        except UnreadableImage as error:
            raise UserError(f"cannot use this image: {error}.") from None
    if isinstance(value, np.ndarray) and value.dtype.kind in "buif":
        value = torch.from_numpy(np.array(value))  # a copy: torch accepts neither read-only nor reversed arrays
    if not isinstance(value, Tensor):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise UserError(f"images must be a tensor, an array, a PIL image or a list of these, not {kind}.")
    images = _batch(value, cfg.sample_shape)
    if images.dtype == torch.uint8:
        return from_uint8(images)
    if not images.is_floating_point():
        raise UserError(f"pixels must be uint8 (0 to 255) or floats (-1 to 1), not {str(images.dtype)[6:]}.")
    largest = float(images.detach().abs().amax()) if images.numel() else 0.0
    if MAX_VALUE < largest < math.inf:
        raise UserError(
            f"floating-point pixels must be in [-1, 1], but these reach {largest:.4g}: pass pixels from 0 to 255 as "
            "uint8."
        )
    return images if images.dtype == torch.float32 else images.float()


def as_latents(value: Any, latent_dim: int, count: int | None = None) -> Tensor:
    """Latents (B, d) as a tensor of floats, from a tensor or an array; `count` if there is one per image."""
    z = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = str(z.dtype) if isinstance(z, (Tensor, np.ndarray)) else type(z).__name__
        raise UserError(f"latents must be a tensor or an array of floats, not {kind}.")
    expected = (len(z) if count is None and z.ndim else count, latent_dim)
    if tuple(z.shape) != expected:
        hint = "; run.infer(x).mean are those of images x" if z.ndim > 2 else ""
        raise UserError(f"latents of shape {tuple(z.shape)} given, expected {expected}{hint}.")
    return z if z.dtype == torch.float32 else z.float()


def as_store(images: Any, cfg: Data) -> ImageStore:
    """A store, or images as in `as_images`, for the tasks; floats are rounded to uint8."""
    if isinstance(images, ImageStore):
        return images
    samples = as_images(images, cfg).detach().cpu()
    return MemoryStore(to_uint8(samples) if cfg.is_image else samples)


def _as_samples(value: Any, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape) floats, from a tensor or an array of them or of a single sample."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = str(value.dtype) if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
        raise UserError(f"samples must be a tensor or an array of floats, not {kind}.")
    if tuple(value.shape) == shape:
        value = value[None]
    if tuple(value.shape[1:]) != shape:
        raise UserError(f"this run was trained on samples of shape {shape}; these have shape {tuple(value.shape)}.")
    return value if value.dtype == torch.float32 else value.float()


def _batch(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, C, H, W), from any of the accepted layouts."""
    channels, height, width = shape
    given = tuple(images.shape)
    if given[-3:] == shape and len(given) in (3, 4):
        pass
    elif given[-3:] == (height, width, channels) and len(given) in (3, 4):
        images = images.movedim(-1, -3)
    elif channels == 1 and given[-2:] == (height, width) and len(given) in (2, 3):
        images = images.unsqueeze(-3)
    else:
        text, expected = ("x".join(map(str, dimensions)) for dimensions in (given, shape))
        raise UserError(
            f"this run was trained on images of shape {expected} (channels, height, width); these have shape {text}."
        )
    return images if images.ndim == 4 else images[None]
