"""Check a dataset: decode every image, compute statistics, compare counts and pixels with the published ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data import pack
from dualmcmc.data.catalog import CATALOG, DatasetInfo, expected_counts
from dualmcmc.data.images import ImageSpec, UnreadableImage, as_rgb, convert
from dualmcmc.data.resolve import open_sources
from dualmcmc.data.source import ImageChecksum, ImageSource, StoreSource
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.images import grid
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_THUMBNAILS = 144  # on the contact sheet
COLUMNS = 16
MAX_PAIRS = 5  # duplicates listed by name
THUMBNAIL = ImageSpec(64, 3)
NO_CHECKSUM = "without a published checksum"


@dataclass
class SplitReport:
    """The statistics of one split."""

    split: str
    images: int
    expected: int | None  # published number of images, if known
    sizes: dict[str, int]  # "178x218" -> count, the most frequent first
    channels: int  # 1 if all images are greyscale
    mean: list[float]  # per channel, pixels in [0, 1]
    std: list[float]
    duplicates: int  # images equal to an earlier one, in any split
    duplicate_pairs: list[str]
    unreadable: list[str]
    checksum: str  # of the images in any order
    pixels: str  # "as published", "not as published", "as packed", "not as packed" or NO_CHECKSUM
    sheet: Tensor = field(repr=False)  # (3, h, w) uint8

    def is_valid(self, skip_bad: bool = False) -> bool:
        """Whether counts and pixels are right; `skip_bad` accepts unreadable images."""
        skipped = len(self.unreadable) if skip_bad else 0
        complete = self.expected in (None, self.images + skipped)
        return len(self.unreadable) == skipped and complete and not self.pixels.startswith("not as")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: value for key, value in vars(self).items() if key != "sheet"} | {"valid": self.is_valid()}


def check(name: str, path: Path | None = None, progress: ProgressFactory = no_progress) -> list[SplitReport]:
    """Check every split of a named dataset, or the images at `path` (name "folder")."""
    seen: dict[bytes, str] = {}
    sources = open_sources(name, path)
    counts = expected_counts(name, sources)
    reports = [
        _check_split(split, source, counts.get(split), CATALOG.get(name), seen, progress)
        for split, source in sources.items()
    ]
    if not any(report.images or report.unreadable for report in reports):
        raise UserError(f"'{path or name}' contains no images.")
    return reports


def missing_splits(name: str, reports: list[SplitReport]) -> list[str]:
    """Published splits of a named dataset that were not found."""
    found = {report.split for report in reports}
    return [split for split in expected_counts(name, found) if split not in found]


def _check_split(
    split: str,
    source: ImageSource,
    expected: int | None,
    dataset: DatasetInfo | None,
    seen: dict[bytes, str],
    progress: ProgressFactory,
) -> SplitReport:
    checksum, sizes = ImageChecksum(), Counter[str]()
    unreadable: list[str] = []
    pairs: list[str] = []
    histogram = np.zeros((3, 256), np.int64)  # per channel; gives exact sums
    grey, duplicates = True, 0
    thumbnails: list[np.ndarray] = []
    stride = 1
    with progress(f"checking {source.name}", source.count, "images") as advance:
        for name, pixels in source.items(ImageSpec()):
            advance(1)
            if isinstance(pixels, UnreadableImage):
                unreadable.append(f"{sanitize(name, 300)}: {pixels}")
                continue
            digest = checksum.add(pixels.transpose(2, 0, 1))
            if digest in seen:
                duplicates += 1
                if len(pairs) < MAX_PAIRS:
                    pairs.append(sanitize(f"{name} = {seen[digest]}", 600))
            else:
                seen[digest] = name
            height, width, channels = pixels.shape
            sizes[f"{width}x{height}"] += 1
            grey = grey and channels == 1
            for channel in range(3):
                histogram[channel] += np.bincount(pixels[..., min(channel, channels - 1)].ravel(), minlength=256)
            if (len(checksum.digests) - 1) % stride == 0:  # evenly spaced, though the total may be unknown
                thumbnails.append(np.ascontiguousarray(as_rgb(_thumbnail(pixels))))
                if len(thumbnails) == 2 * MAX_THUMBNAILS:
                    thumbnails, stride = thumbnails[::2], 2 * stride
    mean, std = _mean_and_std(histogram[:1] if grey else histogram)
    return SplitReport(
        split=split,
        images=len(checksum.digests),
        expected=expected,
        sizes=dict(sizes.most_common()),
        channels=1 if grey else 3,
        mean=mean,
        std=std,
        duplicates=duplicates,
        duplicate_pairs=pairs,
        unreadable=unreadable,
        checksum=checksum.checksum,
        pixels=_compare_pixels(split, source, checksum.checksum, dataset),
        sheet=_contact_sheet(thumbnails[:: -(-len(thumbnails) // MAX_THUMBNAILS) or 1]),
    )


def _thumbnail(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.shape[:2] in ((8, 8), (28, 28), (32, 32)) else convert(pixels, THUMBNAIL)


def _contact_sheet(thumbnails: list[np.ndarray]) -> Tensor:
    if not thumbnails:
        return torch.full((3, 8, 8), 255, dtype=torch.uint8)
    if any(image.shape != thumbnails[0].shape for image in thumbnails):
        thumbnails = [convert(image, THUMBNAIL) for image in thumbnails]
    return grid(torch.from_numpy(np.stack(thumbnails)).permute(0, 3, 1, 2), COLUMNS)


def _mean_and_std(histogram: np.ndarray) -> tuple[list[float], list[float]]:
    count = max(1, int(histogram[0].sum()))
    values = np.arange(256) / 255
    mean = histogram @ values / count
    variance = histogram @ values**2 / count - mean**2
    return mean.tolist(), np.sqrt(variance.clip(0)).tolist()


def _compare_pixels(split: str, source: ImageSource, checksum: str, dataset: DatasetInfo | None) -> str:
    if dataset is not None and split in dataset.checksums:
        return "as published" if dataset.checksums[split] == checksum else "not as published"
    if isinstance(source, StoreSource) and isinstance(source.store, pack.PackedStore):
        return "as packed" if source.store.is_intact() else "not as packed"
    return NO_CHECKSUM
