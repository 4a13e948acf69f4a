"""Feature statistics of a set of images, worked out once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualmcmc.crew import ALONE, Crew
from dualmcmc.data.cache import cache_folder
from dualmcmc.data.store import Store
from dualmcmc.errors import UserError
from dualmcmc.files import atomic, make_folder
from dualmcmc.metrics.features import Features
from dualmcmc.metrics.frechet import Moments
from dualmcmc.progress import Watch, quiet

FOLDER = "statistics"
PART = 1000  # images looked at together
METHOD = "tf1-bilinear-299"  # how images are brought to the network: another one would be another statistic


class FeatureSet:
    """Features that come in parts: their moments, and all of them only where something needs all."""

    def __init__(self, features: Features, keep: bool) -> None:
        self.moments = Moments(features.dimension, features.device)
        self._kept: dict[int, Tensor] | None = {} if keep else None  # by the number of the first of them

    def add(self, rows: Tensor, first: int) -> None:
        """Take in (N, D), of which the first has this number."""
        self.moments.add(rows)
        if self._kept is not None:
            self._kept[first] = rows.cpu()

    def join(self, crew: Crew) -> None:
        """Take in what the other processes have."""
        self.moments.join(crew)
        if self._kept is not None:
            self._kept = {first: rows for part in crew.gather(self._kept) for first, rows in part.items()}

    def rows(self) -> Tensor:
        """All of them, in memory (not on the GPU)."""
        assert self._kept is not None
        return torch.cat([self._kept[first] for first in sorted(self._kept)])


def reference(
    images: Store,
    what: dict[str, Any],
    features: Features,
    keep: bool = False,
    watch: Watch = quiet,
    crew: Crew = ALONE,
) -> tuple[FeatureSet, bool]:
    """Features of a whole set; from the cache where only moments are wanted. Also whether they came from there.

    The file is found by the set's name, size and crop (`what`) and by the checksums of its pixels and of the
    network, and holds a checksum of its own: what does not agree is worked out again.
    """
    key = {
        "source": what["source"],
        "split": what["split"],
        "size": what["size"],
        "channels": what["channels"],
        "crop": what["crop"],
        "resize": what["resize"],
        "images": len(images),
        "pixels": images.checksum,
        "network": features.checksum,
        "method": METHOD,
    }
    path = _path(key)
    found = FeatureSet(features, keep)
    if not keep:
        known = crew.from_first(lambda: _read(path, key))  # others may have another cache, and must do the same
        if known is not None:
            found.moments = Moments.known(known[0], *(moment.to(features.device) for moment in known[1:]))
            return found, True
    with crew.alike(), watch(f"features of {what['source']} {what['split']}", len(images), "images") as advance:
        for start in range(PART * crew.rank, len(images), PART * crew.world):
            part = images.take(np.arange(start, min(start + PART, len(images))))
            found.add(features(part), start)
            advance(len(part) * crew.world)
    found.join(crew)
    if crew.leads:
        with suppress(UserError):  # a cache that cannot be written to costs the next call time, not this its result
            _write(path, key, found.moments)
    # as they will come from the cache, so that the next number is the same to the last digit
    found.moments = Moments.known(len(images), found.moments.mean, found.moments.covariance)
    return found, False


def _path(key: dict[str, Any]) -> Path:
    code = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / FOLDER / f"{key['source'][:60]}-{key['size']}-{key['crop']}-{code}.safetensors"


def _write(path: Path, key: dict[str, Any], moments: Moments) -> None:
    make_folder(path.parent, "Statistics are kept there: set $DUALMCMC_DATA to another folder.")
    tensors = {"mean": moments.mean.cpu(), "covariance": moments.covariance.cpu()}
    header = {"key": json.dumps(key, sort_keys=True), "count": str(moments.count), "sha256": _checksum(tensors)}
    with atomic(path) as temporary:
        save_file(tensors, str(temporary), metadata=header)


def _read(path: Path, key: dict[str, Any]) -> tuple[int, Tensor, Tensor] | None:
    """What was worked out before, if it is sound and of the same images and network: count, mean, covariance."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("mean", "covariance")}
        count = int(header["count"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if header.get("key") != json.dumps(key, sort_keys=True) or header.get("sha256") != _checksum(tensors):
        return None
    return count, tensors["mean"], tensors["covariance"]


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
