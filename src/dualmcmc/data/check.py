"""A close look at a set: everything decoded, counted, summed up, compared with what was published."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data import pack
from dualmcmc.data.images import BadImage, Fit, as_rgb, fit_pixels
from dualmcmc.data.opening import open_sources
from dualmcmc.data.sets import SETS, ImageSet, published
from dualmcmc.data.source import Source, Stored
from dualmcmc.data.tally import Tally
from dualmcmc.errors import UserError
from dualmcmc.pictures import grid
from dualmcmc.progress import Watch, quiet
from dualmcmc.words import plain

SHOWN = 144  # images on the contact sheet
COLUMNS = 16
NAMED = 5  # pairs of duplicates kept by name
THUMB = Fit(64, 3)
UNKNOWN = "without a published checksum"


@dataclass
class SplitReport:
    """What one split holds."""

    split: str
    images: int
    published: int | None  # how many there should be, where known
    sizes: dict[str, int]  # "178x218" -> how many, the most frequent first
    channels: int  # 1 where all are grey
    mean: list[float]  # per channel, pixels in [0, 1]
    std: list[float]
    duplicates: int  # images equal to an earlier one, in any split
    duplicate_pairs: list[str]
    bad: list[str]
    checksum: str  # of the images in any order
    pixels: str  # "as published", "not as published", "as packed", "not as packed" or UNKNOWN
    sheet: Tensor = field(repr=False)  # (3, h, w)

    def is_sound(self, skip_bad: bool = False) -> bool:
        """Whether nothing is wrong with it; with `skip_bad`, files that cannot be read are not."""
        left_out = len(self.bad) if skip_bad else 0
        whole = self.published in (None, self.images + left_out)
        return len(self.bad) == left_out and whole and not self.pixels.startswith("not as")

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {key: value for key, value in vars(self).items() if key != "sheet"} | {"sound": self.is_sound()}


def check(name: str, path: Path | None = None, watch: Watch = quiet) -> list[SplitReport]:
    """Look through every split of a named set, or of images at `path` (name folder)."""
    seen: dict[bytes, str] = {}
    chosen = SETS.get(name)
    sources = open_sources(name, path)
    counts = published(name, sources)
    reports = [_look(split, source, counts.get(split), chosen, seen, watch) for split, source in sources.items()]
    if not any(report.images or report.bad for report in reports):
        raise UserError(f"'{path or name}' holds no images.")
    return reports


def missing(name: str, reports: list[SplitReport]) -> list[str]:
    """Splits of a named set that should be there and are not."""
    found = {report.split for report in reports}
    return [split for split in published(name, found) if split not in found]


def _look(
    split: str, source: Source, count: int | None, chosen: ImageSet | None, seen: dict[bytes, str], watch: Watch
) -> SplitReport:
    tally, sizes = Tally(), Counter[str]()
    bad: list[str] = []
    pairs: list[str] = []
    levels = np.zeros((3, 256), np.int64)  # a histogram of each channel gives exact sums
    grey, duplicates = True, 0
    shown: list[np.ndarray] = []
    stride = 1
    with watch(f"checking {source.name}", source.count, "images") as advance:
        for name, pixels in source.items(Fit()):
            advance(1)
            if isinstance(pixels, BadImage):
                bad.append(f"{plain(name, 300)}: {pixels}")
                continue
            digest = tally.add(pixels.transpose(2, 0, 1))
            if digest in seen:
                duplicates += 1
                if len(pairs) < NAMED:
                    pairs.append(plain(f"{name} = {seen[digest]}", 600))
            else:
                seen[digest] = name
            height, width, channels = pixels.shape
            sizes[f"{width}x{height}"] += 1
            grey = grey and channels == 1
            for channel in range(3):
                levels[channel] += np.bincount(pixels[..., min(channel, channels - 1)].ravel(), minlength=256)
            if (len(tally.digests) - 1) % stride == 0:  # evenly spread over a number that is not known yet
                shown.append(np.ascontiguousarray(as_rgb(_thumb(pixels))))
                if len(shown) == 2 * SHOWN:
                    shown, stride = shown[::2], 2 * stride
    mean, std = _moments(levels[:1] if grey else levels)
    return SplitReport(
        split=split,
        images=len(tally.digests),
        published=count,
        sizes=dict(sizes.most_common()),
        channels=1 if grey else 3,
        mean=mean,
        std=std,
        duplicates=duplicates,
        duplicate_pairs=pairs,
        bad=bad,
        checksum=tally.checksum,
        pixels=_verdict(split, source, tally, chosen),
        sheet=_sheet(shown[:: -(-len(shown) // SHOWN) or 1]),
    )


def _thumb(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.shape[:2] in ((8, 8), (28, 28), (32, 32)) else fit_pixels(pixels, THUMB)


def _sheet(shown: list[np.ndarray]) -> Tensor:
    """A (3, h, w) picture of a choice of the images."""
    if not shown:
        return torch.full((3, 8, 8), 255, dtype=torch.uint8)
    same = all(image.shape == shown[0].shape for image in shown)
    images = shown if same else [fit_pixels(image, THUMB) for image in shown]
    return grid(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), COLUMNS)


def _moments(levels: np.ndarray) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, pixels in [0, 1]."""
    count = max(1, int(levels[0].sum()))
    values = np.arange(256) / 255
    mean = levels @ values / count
    variance = levels @ values**2 / count - mean**2
    return mean.tolist(), np.sqrt(variance.clip(0)).tolist()


def _verdict(split: str, source: Source, tally: Tally, chosen: ImageSet | None) -> str:
    if chosen is not None and split in chosen.pins:
        return "as published" if chosen.pins[split] == tally.checksum else "not as published"
    if isinstance(source, Stored) and isinstance(source.store, pack.Packed):
        return "as packed" if source.store.is_intact() else "not as packed"
    return UNKNOWN
