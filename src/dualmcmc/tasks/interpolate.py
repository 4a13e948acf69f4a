"""Straight and spherical ways between latents, and what the generator makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualmcmc.errors import UserError
from dualmcmc.pictures import grid, stacked, to_uint8
from dualmcmc.tasks.run import Run, finite


@dataclass(frozen=True)
class Interpolation:
    """Images (pairs, points, C, H, W) in [-1, 1] from one end of each pair to the other, and numbers on them."""

    images: Tensor
    numbers: dict[str, Any]


def between(a: Tensor, b: Tensor, points: int, spherical: bool = False) -> Tensor:
    """(B, points, d): latents from a (B, d) to b (B, d), both ends included.

    Linear is the paper's (1 - t) a + t b. Spherical turns from one direction to the other and lets the
    length grow evenly, so that the way between two draws of a prior does not lead through its empty middle.
    """
    t = torch.linspace(0, 1, points, dtype=a.dtype, device=a.device)[None, :, None]
    a, b = a[:, None], b[:, None]
    straight = (1 - t) * a + t * b
    if not spherical:
        return straight
    length_a, length_b = a.norm(dim=2, keepdim=True), b.norm(dim=2, keepdim=True)
    angle = torch.arccos((a / length_a * b / length_b).sum(2, keepdim=True).clamp(-1, 1))
    turn = (torch.sin((1 - t) * angle) * a / length_a + torch.sin(t * angle) * b / length_b) / torch.sin(angle)
    round_way = turn * ((1 - t) * length_a + t * length_b)
    flat = (torch.sin(angle).abs() < 1e-3) | ~torch.isfinite(round_way).all(2, keepdim=True)  # parallel, or zero
    return torch.where((t == 0) | (t == 1) | flat, straight, round_way)


def interpolate(run: Run, a: Tensor, b: Tensor, points: int = 9, spherical: bool = False) -> Interpolation:
    """The generator's images between latents a and b (B, d)."""
    if points < 2:
        raise UserError(f"--points must be at least 2, not {points}.")
    z = between(a, b, points, spherical)
    images = finite(run.generate(z.flatten(0, 1))).unflatten(0, z.shape[:2])
    steps = (images[:, 1:] - images[:, :-1]).square().flatten(2).mean(2).sqrt()  # (pairs, points - 1)
    energy = run.energy(images.flatten(0, 1)).unflatten(0, z.shape[:2])
    return Interpolation(
        images,
        {
            "pairs": len(images),
            "points": points,
            "spherical": spherical,
            "step_mean": float(steps.mean()),  # rms per pixel from one image to the next
            "step_largest": float(steps.max()),
            "unevenness": float((steps.amax(1) / steps.mean(1).clamp(min=1e-12)).mean()),  # 1: all steps alike
            "energy": energy.double().mean(0).tolist(),  # at each point
        },
    )


def prior_pairs(run: Run, pairs: int) -> tuple[Tensor, Tensor]:
    """The ends of ways between draws from the prior."""
    z = run.prior(2 * pairs, run.stream("prior"))
    return z[::2], z[1::2]


def inferred_pairs(run: Run, images: Tensor) -> tuple[Tensor, Tensor]:
    """The latents of images (2 B, ...) in [-1, 1], inference + z-chain: the first of each two, and the second."""
    if len(images) < 2:
        raise UserError(f"a way between images needs two of them, and there is {len(images)}.")
    images = images[: len(images) // 2 * 2]
    z = run.revise_z(run.infer(images).mean, images, rng=run.stream("z-chain"))
    return z[::2], z[1::2]


def picture(*found: Interpolation) -> Tensor:
    """One row a pair; several interpolations one below the other."""
    return stacked(*(grid(to_uint8(one.images.flatten(0, 1)).cpu(), one.images.shape[1]) for one in found))
