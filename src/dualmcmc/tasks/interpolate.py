"""Linear and spherical interpolation between latents, and the generator's images along the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualmcmc.tasks.convert import as_latents
from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import stacked, strip, to_uint8
from dualmcmc.utils.tree import Tree


@dataclass(frozen=True)
class Interpolation(Tree):
    """Images (pairs, points, C, H, W) in [-1, 1] from the first to the second of each pair, and numbers about them."""

    images: Tensor
    numbers: dict[str, Any]


def between(a: Tensor, b: Tensor, points: int, spherical: bool = False) -> Tensor:
    """(B, points, d): latents from a (B, d) to b (B, d), both ends included.

    Linear: (1 - t) a + t b, as in the paper. Spherical: the direction rotates and the norm changes linearly, so that
    latents between two prior draws keep a typical norm.
    """
    t = torch.linspace(0, 1, points, dtype=a.dtype, device=a.device)[None, :, None]
    a, b = a[:, None], b[:, None]
    linear = (1 - t) * a + t * b
    if not spherical:
        return linear
    norm_a, norm_b = a.norm(dim=2, keepdim=True), b.norm(dim=2, keepdim=True)
    angle = torch.arccos((a / norm_a * b / norm_b).sum(2, keepdim=True).clamp(-1, 1))
    direction = (torch.sin((1 - t) * angle) * a / norm_a + torch.sin(t * angle) * b / norm_b) / torch.sin(angle)
    result = direction * ((1 - t) * norm_a + t * norm_b)
    degenerate = (torch.sin(angle).abs() < 1e-3) | ~torch.isfinite(result).all(2, keepdim=True)  # parallel, or zero
    return torch.where((t == 0) | (t == 1) | degenerate, linear, result)


def interpolate(run: Run, a: Any, b: Any, points: int = 9, spherical: bool = False) -> Interpolation:
    """The generator's images between latents a and b (B, d)."""
    if points < 2:
        raise UserError(f"--points must be at least 2, not {points}.")
    a = as_latents(a, run.config.teaching.latent_dim)
    b = as_latents(b, run.config.teaching.latent_dim, len(a))
    z = between(a, b, points, spherical)
    images = require_finite(run.generate(z.flatten(0, 1))).unflatten(0, z.shape[:2])
    change = (images[:, 1:] - images[:, :-1]).square().flatten(2).mean(2).sqrt()  # (pairs, points - 1), rms per pixel
    numbers: dict[str, Any] = {}
    if run.has("energy"):  # at each point
        energy = run.energy(images.flatten(0, 1)).unflatten(0, z.shape[:2])
        numbers["energy"] = energy.double().mean(0).tolist()
    return Interpolation(
        images,
        {
            "pairs": len(images),
            "points": points,
            "spherical": spherical,
            "pixel_change_rms_mean": float(change.mean()),  # from one image to the next
            "pixel_change_rms_max": float(change.max()),
            "max_to_mean_change": float((change.amax(1) / change.mean(1).clamp(min=1e-12)).mean()),  # 1: uniform
            **numbers,
        },
    )


def prior_pairs(run: Run, pairs: int) -> tuple[Tensor, Tensor]:
    """Pairs of latents drawn from the prior."""
    z = run.prior(2 * pairs, run.generator_for("prior"))
    return z[::2], z[1::2]


def inferred_pairs(run: Run, images: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of latents of consecutive images (2 B, ...) in [-1, 1], by inference (if any) + z-chain."""
    if len(images) < 2:
        raise UserError(f"interpolation needs at least two images, not {len(images)}.")
    images = images[: len(images) // 2 * 2]
    rng = run.generator_for("z-chain")
    z = run.revise_z(run.initial_latents(images, rng), images, rng=rng)
    return z[::2], z[1::2]


def picture(results: Mapping[str, Interpolation]) -> Tensor:
    """One row per pair, one column per point t; interpolations below each other, with the key as the caption."""
    return stacked(*map(_strip, results.values()), captions=list(results))


def _strip(result: Interpolation) -> Tensor:
    pairs, points = result.images.shape[:2]
    captions = [f"{'t = ' * (k == 0)}{k / (points - 1):.3g}" for k in range(points)]
    return strip(to_uint8(result.images).cpu().unbind(1), pairs, captions)
