"""Image tensors: conversion to and from uint8, captioned grids, PNG files."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dualmcmc.utils.files import atomic

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

MIN_SIDE = 64  # of an image in a picture, so that a caption fits above it
MIN_TEXT = 12  # pixels: the font's size
TEXT_GREY = 60


def to_uint8(x: Tensor) -> Tensor:
    """[-1, 1] to uint8, clamped and rounded."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def from_uint8(x: Tensor) -> Tensor:
    """uint8 to [-1, 1]."""
    return x.float() / 127.5 - 1


def as_float(x: Tensor) -> Tensor:
    """What the networks see of stored samples: uint8 pixels in [-1, 1], floats as they are."""
    return from_uint8(x) if x.dtype == torch.uint8 else x


def grid(images: Tensor, columns: int) -> Tensor:
    """(N, C, H, W) uint8 images as one (C, h, w) grid, row by row on white, small ones enlarged by an integer."""
    count, channels, height, width = images.shape
    scale, gap = _scale_and_gap(height)
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    height, width = height * scale, width * scale
    columns = min(columns, count)
    rows = -(-count // columns)
    canvas = torch.full((channels, rows * (height + gap) - gap, columns * (width + gap) - gap), 255, dtype=torch.uint8)
    for index, image in enumerate(images.cpu()):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        canvas[:, top : top + height, left : left + width] = image
    return canvas


def _scale_and_gap(height: int) -> tuple[int, int]:
    """How much images of this height are enlarged in a grid, and the pixels between them."""
    scale = max(1, -(-MIN_SIDE // height))
    return scale, max(1, scale // 2)


def strip(frames: Sequence[Tensor], rows: int, captions: Sequence[str]) -> Tensor:
    """Frames of (N, C, H, W) uint8 images: one row per image (the first `rows`), one captioned column per frame."""
    _, gap = _scale_and_gap(frames[0].shape[2])
    return side_by_side(*(grid(frame[:rows], 1) for frame in frames), captions=captions, gap=gap)


def side_by_side(*pictures: Tensor, captions: Sequence[str] = (), gap: int = 24) -> Tensor:
    """(C, h, w) pictures next to each other, on white, each below its caption."""
    if captions:
        pictures = _captioned(pictures, captions, sum(picture.shape[2] for picture in pictures))
    height = max(picture.shape[1] for picture in pictures)
    return torch.cat(_on_white([(p, height, p.shape[2] + gap, 0) for p in pictures]), dim=2)[..., :-gap]


def stacked(*pictures: Tensor, captions: Sequence[str] = (), gap: int = 24) -> Tensor:
    """(C, h, w) pictures below each other, centred on white, each below its caption."""
    width = max(picture.shape[2] for picture in pictures)
    if captions:
        captioned = [_captioned([p], [c], width) for p, c in zip(pictures, captions, strict=True)]
        pictures = tuple(picture for (picture,) in captioned)
    placed = [(p, p.shape[1] + gap, width, (width - p.shape[2]) // 2) for p in pictures]
    return torch.cat(_on_white(placed), dim=1)[:, :-gap]


def before_and_after(before: Tensor | None, after: Tensor | None, columns: int, steps: str) -> Tensor:
    """Grids of uint8 images next to each other: generator samples, and the same after the x-chain's steps, if any."""
    parts = {"generator": before, f"after {steps}": after}
    grids = {caption: grid(images, columns) for caption, images in parts.items() if images is not None}
    return side_by_side(*grids.values(), captions=list(grids))


def _captioned(pictures: Sequence[Tensor], captions: Sequence[str], width: int) -> tuple[Tensor, ...]:
    """Each picture below its caption, centred and wrapped to the picture's width; captions get the same height.

    The text grows with `width`, the width of all that is shown together, as far as a word fits above each picture.
    """
    narrowest = min(picture.shape[2] for picture in pictures)
    font = _font(max(MIN_TEXT, min(width // 64, narrowest // 5)))
    wrapped = [_wrap(text, font, picture.shape[2]) for text, picture in zip(captions, pictures, strict=True)]
    height = max(map(len, wrapped))
    blank = [[""] * (height - len(lines)) for lines in wrapped]  # above the text
    texts = [_draw([*b, *t], font, p.shape[2]) for b, t, p in zip(blank, wrapped, pictures, strict=True)]
    return tuple(
        torch.cat(_on_white([(part, part.shape[1], part.shape[2], 0) for part in (text, picture)]), dim=1)
        for text, picture in zip(texts, pictures, strict=True)
    )


@lru_cache
def _font(size: int) -> FreeTypeFont:
    """The font that Pillow ships: the same on every machine."""
    from PIL import ImageFont

    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


def _wrap(text: str, font: FreeTypeFont, width: int) -> list[str]:
    """Lines that fit into `width` pixels, as few as possible; words that are too long are broken."""
    lines = [text]
    for characters in range(len(text), 0, -1):
        lines = textwrap.wrap(text, characters, break_on_hyphens=False)
        if max(map(font.getlength, lines)) <= width:
            break
    return lines


def _draw(lines: Sequence[str], font: FreeTypeFont, width: int) -> Tensor:
    """Centred lines of text, as a (1, h, width) uint8 picture."""
    from PIL import Image, ImageDraw

    line_height, margin = sum(font.getmetrics()), font.size // 3
    image = Image.new("L", (width, len(lines) * line_height + int(margin)), 255)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((width // 2, number * line_height), line, TEXT_GREY, font, anchor="ma")
    return torch.from_numpy(np.array(image))[None]


class Picture:
    """(C, h, w) uint8 pixels that Jupyter shows, and that can be saved."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __repr__(self) -> str:
        return f"Picture({self.pixels.shape[2]}x{self.pixels.shape[1]})"

    def _repr_png_(self) -> bytes:
        return encode_png(self.pixels)

    def save(self, path: str | Path) -> None:
        """Write a PNG file."""
        save_png(self.pixels, Path(path))


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


def _on_white(placed: Sequence[tuple[Tensor, int, int, int]]) -> list[Tensor]:
    """Each picture on a white canvas of the given height and width, `left` pixels in; in colour if any of them is."""
    channels = max(picture.shape[0] for picture, *_ in placed)
    result = []
    for picture, height, width, left in placed:
        canvas = torch.full((channels, height, width), 255, dtype=torch.uint8)
        canvas[:, : picture.shape[1], left : left + picture.shape[2]] = picture.cpu()
        result.append(canvas)
    return result
