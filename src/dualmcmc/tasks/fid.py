"""FID's network, FID between two sets of images, and the cached statistics of datasets."""

from __future__ import annotations

import hashlib
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualmcmc import data
from dualmcmc.config import Crop
from dualmcmc.data import inception_weights
from dualmcmc.data.catalog import CATALOG
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.inception_weights import PACKAGE, RELEASE
from dualmcmc.data.resolve import open_stores
from dualmcmc.data.store import ImageStore
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.metrics.inception import FEATURE_DIM, INPUT_SIZE, FeatureExtractor, Inception, from_tensors
from dualmcmc.tasks.inputs import conversion_notes, parse_dataset
from dualmcmc.utils.errors import UserError, first_line
from dualmcmc.utils.files import atomic, cache_folder, make_folder
from dualmcmc.utils.progress import ProgressFactory, no_progress

ENOUGH_IMAGES = 10_000  # with fewer, FID's bias deserves a note
CACHE = "statistics"  # folder in the cache folder
BATCH = 1000  # images
METHOD = "tf1-bilinear-299"  # of preprocessing; part of the cache key


def load_features(
    path: Path | None = None, device: torch.device | str = "cpu", trust: bool = False
) -> FeatureExtractor:
    """FID's network, from the cache folder or from a file with a known checksum.

    With `trust`, `path` may be any TorchScript module from (N, 3, 299, 299) floats, (pixel - 128) / 128, to (N, D).
    Such a module is code: trust only your own. Results of other networks are not called FID.
    """
    path, trust = (inception_weights.find(), False) if path is None else (Path(path), trust)
    if not path.is_file():
        raise UserError(f"'{path}' does not exist.")
    content = path.read_bytes()  # read once, so that what is verified is what is loaded
    checksum = hashlib.sha256(content).hexdigest()
    if checksum in (RELEASE, PACKAGE):
        return FeatureExtractor(_load_inception(io.BytesIO(content), checksum), FEATURE_DIM, device, True, checksum)
    if not trust:
        raise UserError(
            f"'{path}' is not a published Inception file (SHA-256 {checksum[:16]}...): 'dualmcmc data fetch inception' "
            "downloads one. If it is your own TorchScript module, which is code, add --trust-inception."
        )
    try:
        net = torch.jit.load(io.BytesIO(content), map_location="cpu").eval()
        with torch.no_grad():
            example = net(torch.zeros(2, 3, INPUT_SIZE, INPUT_SIZE))
        if example.ndim != 2 or len(example) != 2:
            raise UserError(f"'{path}' returns shape {tuple(example.shape)} for two images, expected (2, D).")
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(f"'{path}' cannot be used as a feature network: {first_line(error)}.") from None
    return FeatureExtractor(net, example.shape[1], device, False, checksum)


def _load_inception(content: io.BytesIO, checksum: str) -> Inception:
    if checksum == RELEASE:
        return from_tensors(torch.load(content, map_location="cpu", weights_only=True))
    return from_tensors(torch.jit.load(content, map_location="cpu").state_dict())


def distance(
    first: str,
    second: str,
    features: FeatureExtractor,
    size: int | None = None,
    crop: Crop = "center",
    skip_bad: bool = False,
    progress: ProgressFactory = no_progress,
) -> tuple[str, float, list[dict[str, Any]]]:
    """FID between two datasets (see `parse_dataset`): the metric's name, its value, and descriptions of both."""
    datasets = [parse_dataset(word) for word in (first, second)]
    sizes = {CATALOG[name].size for name, _, _ in datasets if name in CATALOG} - {None}
    if size is None and len(sizes) != 1:
        raise UserError("--size is required: the sizes of the two datasets differ or are unknown.")
    channels = 1 if all(name in CATALOG and CATALOG[name].channels == 1 for name, _, _ in datasets) else 3
    moments: list[Moments] = []
    descriptions: list[dict[str, Any]] = []
    for word, (name, path, split) in zip((first, second), datasets, strict=True):
        notes: list[str] = []
        spec = ImageSpec(size or next(iter(sizes)), channels, crop)
        stores = open_stores(name, path, [split] if split else ["train", "test"], spec, skip_bad, progress, notes)
        chosen = split or ("train" if "train" in stores else "test")
        if chosen not in stores:
            raise UserError(f"{path or name} has no split '{chosen}'.")
        notes += conversion_notes(word, spec)
        what: dict[str, Any] = {
            "source": path.resolve().name if path and name == "folder" else name,
            "split": chosen,
            "size": spec.size,
            "channels": channels,
            "crop": crop,
            "resize": spec.resize,
        }
        store = stores[chosen]
        if len(store) < 2:
            raise UserError(f"{path or name} has only {len(store)} image: FID needs at least two.")
        moments.append(reference_features(store, what, features, progress=progress)[0].moments)
        descriptions.append({**what, "images": len(store), "checksum": data.fingerprint(store), "notes": notes})
    descriptions[0]["notes"] += small_sample_notes(min(one["images"] for one in descriptions))
    return features.metric_name, frechet_distance(*moments), descriptions


def small_sample_notes(count: int) -> list[str]:
    """A note on the bias of FID if it is from few images."""
    if count >= ENOUGH_IMAGES:
        return []
    return [f"FID from only {count:,} images is strongly biased upwards: do not compare it with FID from 50,000"]


class FeatureSet:
    """Features accumulated batch by batch: their moments, and with `keep` the features themselves."""

    def __init__(self, features: FeatureExtractor, keep: bool) -> None:
        self.moments = Moments(features.dimension, features.device)
        self._kept: dict[int, Tensor] | None = {} if keep else None  # by the index of the first of each batch

    def add(self, rows: Tensor, first: int) -> None:
        """Add (N, D) features of the images with indices `first`, `first` + 1, ..."""
        self.moments.add(rows)
        if self._kept is not None:
            self._kept[first] = rows.cpu()

    def all_gather(self, world: World) -> None:
        """Combine the features of all processes."""
        self.moments.all_reduce(world.all_reduce_)
        if self._kept is not None:
            self._kept = {first: rows for part in world.all_gather(self._kept) for first, rows in part.items()}

    def rows(self) -> Tensor:
        """All features in order, on the CPU."""
        assert self._kept is not None
        return torch.cat([self._kept[first] for first in sorted(self._kept)])


def reference_features(
    images: ImageStore,
    what: dict[str, Any],
    features: FeatureExtractor,
    keep: bool = False,
    progress: ProgressFactory = no_progress,
    world: World = SINGLE_PROCESS,
) -> tuple[FeatureSet, bool]:
    """Features of a dataset, and whether they came from the cache, which contains moments only.

    The cache key consists of the dataset's name, size and crop (`what`) and the checksums of its pixels and of the
    network. A file that does not match its own checksum is computed again.
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
    path = _cache_path(key)
    result = FeatureSet(features, keep)
    if not keep:
        cached = world.on_main(lambda: _read_cache(path, key))  # caches may differ, but all ranks must do the same
        if cached is not None:
            count, mean, covariance = cached
            result.moments = Moments.from_statistics(count, mean.to(features.device), covariance.to(features.device))
            return result, True
    task = f"features of {what['source']} {what['split']}"
    with world.fail_together(), progress(task, len(images), "images") as advance:
        for start in range(BATCH * world.rank, len(images), BATCH * world.size):
            batch = images.take(np.arange(start, min(start + BATCH, len(images))))
            result.add(features(batch), start)
            advance(len(batch) * world.size)
    result.all_gather(world)
    if world.is_main:
        with suppress(UserError):  # without a writable cache the next call takes longer
            _write_cache(path, key, result.moments)
    # as the cache returns them, so that the next result has the same digits
    result.moments = Moments.from_statistics(len(images), result.moments.mean, result.moments.covariance)
    return result, False


def _cache_path(key: dict[str, Any]) -> Path:
    code = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / CACHE / f"{key['source'][:60]}-{key['size']}-{key['crop']}-{code}.safetensors"


def _write_cache(path: Path, key: dict[str, Any], moments: Moments) -> None:
    make_folder(path.parent)
    tensors = {"mean": moments.mean.cpu(), "covariance": moments.covariance.cpu()}
    header = {"key": json.dumps(key, sort_keys=True), "count": str(moments.count), "sha256": _checksum(tensors)}
    with atomic(path) as temporary:
        save_file(tensors, str(temporary), metadata=header)


def _read_cache(path: Path, key: dict[str, Any]) -> tuple[int, Tensor, Tensor] | None:
    """Count, mean and covariance; None if the file is missing, damaged, or of other images or another network."""
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
