"""Images in [-1, 1] to and from bytes, and grids of them."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from dualmcmc.files import atomic


def to_uint8(x: Tensor) -> Tensor:
    """Images in [-1, 1] to bytes, rounded; values outside are cut off."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def from_uint8(x: Tensor) -> Tensor:
    """Bytes to [-1, 1]."""
    return x.float() / 127.5 - 1


def grid(images: Tensor, columns: int, gap: int = 1) -> Tensor:
    """(N, C, H, W) bytes to one (C, h, w) picture, row by row on white, small images enlarged."""
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


def side_by_side(*pictures: Tensor, gap: int = 24) -> Tensor:
    """(C, h, w) pictures of one height in a row, on white."""
    channels, height, _ = pictures[0].shape
    spacer = torch.full((channels, height, gap), 255, dtype=torch.uint8)
    parts = [part for picture in pictures for part in (spacer, picture)][1:]
    return torch.cat(parts, dim=2)


def before_and_after(before: Tensor, after: Tensor, columns: int) -> Tensor:
    """Images in [-1, 1] and what a chain made of them: two grids in a row."""
    return side_by_side(*(grid(to_uint8(images).cpu(), columns) for images in (before, after)))


def encode_png(picture: Tensor) -> bytes:
    """A (C, h, w) byte picture as the content of a PNG file."""
    from PIL import Image

    pixels = picture.permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def save_png(picture: Tensor, path: Path) -> None:
    """A (C, h, w) byte picture as a PNG file, atomically."""
    content = encode_png(picture)
    with atomic(path) as temporary:
        temporary.write_bytes(content)


def stacked(*pictures: Tensor, gap: int = 24) -> Tensor:
    """(C, h, w) pictures one below the other, on white."""
    channels, width = pictures[0].shape[0], max(picture.shape[2] for picture in pictures)
    parts = []
    for picture in pictures:
        canvas = torch.full((channels, picture.shape[1] + gap, width), 255, dtype=torch.uint8)
        canvas[:, : picture.shape[1], : picture.shape[2]] = picture
        parts.append(canvas)
    return torch.cat(parts, dim=1)[:, :-gap]
