"""Image tensors: conversion to and from uint8, grids, PNG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dualmcmc.utils.files import atomic


def to_uint8(x: Tensor) -> Tensor:
    """[-1, 1] to uint8, clamped and rounded."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def from_uint8(x: Tensor) -> Tensor:
    """uint8 to [-1, 1]."""
    return x.float() / 127.5 - 1


def grid(images: Tensor, columns: int, gap: int = 1) -> Tensor:
    """(N, C, H, W) uint8 images as one (C, h, w) grid, row by row on white, small ones enlarged."""
    count, channels, height, width = images.shape
    scale = max(1, 64 // height)
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    height, width, gap = height * scale, width * scale, gap * max(1, scale // 2)
    columns = min(columns, count)
    rows = -(-count // columns)
    canvas = torch.full((channels, rows * (height + gap) - gap, columns * (width + gap) - gap), 255, dtype=torch.uint8)
    for index, image in enumerate(images.cpu()):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        canvas[:, top : top + height, left : left + width] = image
    return canvas


def strip(frames: Sequence[Tensor], rows: int) -> Tensor:
    """Frames of (N, C, H, W) uint8 images: one row per image (the first `rows`), one column per frame."""
    table = torch.stack([frame[:rows] for frame in frames], dim=1)  # (rows, frames, C, H, W)
    return grid(table.flatten(0, 1), columns=len(frames))


def side_by_side(*pictures: Tensor, gap: int = 24) -> Tensor:
    """(C, h, w) pictures next to each other, on white."""
    height = max(picture.shape[1] for picture in pictures)
    return torch.cat(_on_white([(p, height, p.shape[2] + gap) for p in pictures]), dim=2)[..., :-gap]


def before_and_after(before: Tensor, after: Tensor, columns: int) -> Tensor:
    """Two grids next to each other: images in [-1, 1] before and after a chain."""
    return side_by_side(*(grid(to_uint8(images).cpu(), columns) for images in (before, after)))


def encode_png(picture: Tensor) -> bytes:
    """A (C, h, w) uint8 picture as PNG data."""
    from PIL import Image

    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def save_png(picture: Tensor, path: Path) -> None:
    """Write a (C, h, w) uint8 picture as a PNG file, atomically."""
    content = encode_png(picture)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def stacked(*pictures: Tensor, gap: int = 24) -> Tensor:
    """(C, h, w) pictures below each other, on white."""
    width = max(picture.shape[2] for picture in pictures)
    return torch.cat(_on_white([(p, p.shape[1] + gap, width) for p in pictures]), dim=1)[:, :-gap]


def _on_white(placed: Sequence[tuple[Tensor, int, int]]) -> list[Tensor]:
    """Each picture on a white canvas of the given height and width; in colour if any of them is."""
    channels = max(picture.shape[0] for picture, _, _ in placed)
    result = []
    for picture, height, width in placed:
        canvas = torch.full((channels, height, width), 255, dtype=torch.uint8)
        canvas[:, : picture.shape[1], : picture.shape[2]] = picture.cpu()
        result.append(canvas)
    return result
