"""FID's network, FID between two sets of images, and the cached statistics of datasets."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualmcmc import data
from dualmcmc.config import Crop, Data
from dualmcmc.data import inception_weights
from dualmcmc.data.catalog import CATALOG
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.inception_weights import PACKAGE, RELEASE
from dualmcmc.data.resolve import open_stores
from dualmcmc.data.store import ImageStore
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.metrics.inception import FEATURE_DIM, INPUT_SIZE, FeatureExtractor, Inception, Precision, from_tensors
from dualmcmc.tasks.inputs import conversion_notes, parse_dataset
from dualmcmc.utils.errors import UserError, first_line, sanitize
from dualmcmc.utils.files import atomic, cache_folder, make_folder
from dualmcmc.utils.progress import Advance, ProgressFactory, no_progress

ENOUGH_IMAGES = 10_000  # with fewer, FID's bias deserves a note
CACHE = "statistics"  # folder in the cache folder
INCLUDED_FOLDER = Path(__file__).parents[1] / "statistics"
INCLUDED = {  # SHA-256 of the numbers in each file; benchmarks/reference_statistics.py makes them
    "cifar10-32-center-381e004659a8c48f.safetensors": (
        "e13388b3c277344ff83710dde7c0960cdfce731b606efbce233011c984ebabeb"
    ),
}
BATCH = 1000  # images
EXACT_IMAGES = 5000  # of a set of samples, whose features correct the moments of all
TENSOR_CORES = (7, 0)  # CUDA compute capability with fast float16
METHOD = "tf1-bilinear-299"  # of preprocessing; part of the key of stored statistics


def load_features(
    path: Path | None = None,
    device: torch.device | str = "cpu",
    trust: bool = False,
    precision: Precision | Literal["auto"] = "float32",
) -> FeatureExtractor:
    """FID's network, from the cache folder or from a file with a known checksum.

    With `trust`, `path` may be any TorchScript module from (N, 3, 299, 299) floats, (pixel - 128) / 128, to (N, D).
    Such a module is code: trust only your own. Results of other networks are not called FID.

    `precision` of the network's convolutions. float16 and tf32 are faster and change FID by up to 0.01
    (benchmarks/inception.py measures it). auto: on a recent GPU float16, with moments that `FeatureSet` corrects by
    float32 features of some images, otherwise float32; what remains of the change is not measured yet.
    """
    choices = ("auto", *get_args(Precision))
    if precision not in choices:
        raise UserError(f"precision must be one of {', '.join(choices)}, not '{sanitize(str(precision))}'.")
    path, trust = (inception_weights.find(), False) if path is None else (Path(path), trust)
    if not path.is_file():
        raise UserError(f"'{path}' does not exist.")
    content = path.read_bytes()  # read once, so that what is verified is what is loaded
    checksum = hashlib.sha256(content).hexdigest()
    if checksum in (RELEASE, PACKAGE):
        net = _load_inception(io.BytesIO(content), checksum)
        if precision != "auto":
            return FeatureExtractor(net, FEATURE_DIM, device, True, checksum, precision)
        exact = FeatureExtractor(net, FEATURE_DIM, device, True, checksum)
        return with_fast_features(exact) if _has_fast_float16(exact.device) else exact
    if not trust:
        raise UserError(
            f"'{path}' is not a published Inception file (SHA-256 {checksum[:16]}...): 'dualmcmc data fetch inception' "
            "downloads one. If it is your own TorchScript module, which is code, add --trust-inception."
        )
    if precision not in ("auto", "float32"):
        raise UserError(f"precision={precision} is for FID's own network; leave it out for '{path}'.")
    try:
        net = torch.jit.load(io.BytesIO(content), map_location="cpu").eval()
        with torch.no_grad():
            example = net(torch.zeros(2, 3, INPUT_SIZE, INPUT_SIZE))
        if example.ndim != 2 or len(example) != 2:
            raise UserError(f"'{path}' returns shape {tuple(example.shape)} for two images, expected (2, D).")
    except (RuntimeError, ValueError, AttributeError) as error:
        raise UserError(f"'{path}' cannot be used as a feature network: {first_line(error)}.") from None
    return FeatureExtractor(net, example.shape[1], device, False, checksum)


def with_fast_features(exact: FeatureExtractor) -> FeatureExtractor:
    """Features in float16, whose moments `FeatureSet` corrects with those of `exact`."""
    net = copy.deepcopy(exact.net)
    return FeatureExtractor(net, exact.dimension, exact.device, exact.standard, exact.checksum, "float16", exact)


def _has_fast_float16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= TENSOR_CORES


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
    """Features of `count` images, accumulated batch by batch: their moments, and with `keep` the features themselves.

    Moments are corrected if the extractor has an exact one: about `EXACT_IMAGES` images pass through that too.
    """

    def __init__(self, features: FeatureExtractor, keep: bool, count: int) -> None:
        self._features, self._every = features, max(1, count // EXACT_IMAGES)
        self.moments, self._exact, self._approximate = (
            Moments(features.dimension, features.device) for _ in range(3)
        )  # of all images; of some, by both extractors
        self._kept: dict[int, Tensor] | None = {} if keep else None  # by the index of the first of each batch

    def add(self, images: Tensor, first: int, advance: Advance = lambda count: None) -> None:
        """Add uint8 images with indices `first`, `first` + 1, ...; `advance` counts those that are done."""
        rows = self._features(images, advance)
        self.moments.add(rows)
        if self._features.exact is not None:
            chosen = slice(-first % self._every, None, self._every)
            if len(some := images[chosen]):
                self._exact.add(self._features.exact(some))
                self._approximate.add(rows[chosen])
        if self._kept is not None:
            self._kept[first] = rows.cpu()

    def all_gather(self, world: World) -> None:
        """Combine the features of all processes; call it last."""
        for moments in (self.moments, self._exact, self._approximate):
            moments.all_reduce(world.all_reduce_)
        if self._features.exact is not None:
            self.moments = self.moments.corrected(self._exact, self._approximate)
        if self._kept is not None:
            self._kept = {first: rows for part in world.all_gather(self._kept) for first, rows in part.items()}

    def rows(self) -> Tensor:
        """All features in order, on the CPU."""
        assert self._kept is not None
        return torch.cat([self._kept[first] for first in sorted(self._kept)])


class Origin(StrEnum):
    """Where the statistics of a dataset come from."""

    COMPUTED = "computed"
    CACHE = "cache"
    PACKAGE = "package"  # included, see `INCLUDED`


def reference_features(
    images: ImageStore,
    what: Mapping[str, Any],
    features: FeatureExtractor,
    keep: bool = False,
    progress: ProgressFactory = no_progress,
    world: World = SINGLE_PROCESS,
) -> tuple[FeatureSet, Origin]:
    """Features of a dataset, and their origin: the cache and the package contain moments only.

    The key of stored statistics consists of the dataset's name, size and crop (`what`) and the checksums of its pixels
    and of the network. A file that does not match its own checksum is computed again. They are exact, whatever the
    extractor.
    """
    features = features.exact or features
    key = statistics_key(what, len(images), images.checksum, features)
    result = FeatureSet(features, keep, len(images))
    if not keep:
        stored = world.on_main(lambda: _find(key))  # caches may differ, but all ranks must do the same
        if stored is not None:
            result.moments = stored[0].to(features.device)
            return result, stored[1]
    task = f"features of {what['source']} {what['split']}"
    with world.fail_together(), progress(task, len(images), "images") as advance:
        for start in range(BATCH * world.rank, len(images), BATCH * world.size):
            batch = images.take(np.arange(start, min(start + BATCH, len(images))))
            result.add(batch, start, lambda count: advance(count * world.size))
    result.all_gather(world)
    if world.is_main:
        with suppress(UserError):  # without a writable cache the next call takes longer
            make_folder(cache_folder() / CACHE)
            write_statistics(cache_folder() / CACHE / statistics_file(key), key, result.moments)
    # as they are stored, so that the next result has the same digits
    result.moments = _from_tensors(len(images), _to_tensors(result.moments, torch.float64)).to(features.device)
    return result, Origin.COMPUTED


def included_reference(cfg: Data, features: FeatureExtractor) -> tuple[FeatureSet, dict[str, Any]] | None:
    """Included statistics of a published dataset, found without its images, and their key; None if there are none."""
    features = features.exact or features
    if cfg.path is not None or cfg.holdout > 0:
        return None
    for name in INCLUDED:
        key = _read_key(INCLUDED_FOLDER / name)
        if (
            key is None
            or statistics_file(key) != name
            or key != statistics_key(vars(cfg), key["images"], key["pixels"], features)
        ):
            continue
        moments = _read_included(name, key)
        if moments is not None:
            result = FeatureSet(features, keep=False, count=key["images"])
            result.moments = moments.to(features.device)
            return result, key
    return None


def statistics_key(what: Mapping[str, Any], images: int, pixels: str, features: FeatureExtractor) -> dict[str, Any]:
    """All that the statistics of a dataset depend on; `pixels`: the checksum of its images."""
    return {
        **{name: what[name] for name in ("source", "split", "size", "channels", "crop", "resize")},
        "images": images,
        "pixels": pixels,
        "network": RELEASE if features.standard else features.checksum,  # both files of FID's network are the same
        "method": METHOD,
        **({} if features.precision == "float32" else {"precision": features.precision}),
    }


def statistics_file(key: Mapping[str, Any]) -> str:
    """The file name of statistics."""
    code = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return f"{key['source'][:60]}-{key['size']}-{key['crop']}-{code}.safetensors"


def write_statistics(path: Path, key: Mapping[str, Any], moments: Moments, dtype: torch.dtype = torch.float64) -> str:
    """Write statistics; `dtype` is that of the covariance. Returns the checksum of the numbers."""
    tensors = _to_tensors(moments, dtype)
    header = {"key": json.dumps(key, sort_keys=True), "sha256": _checksum(tensors)}
    with atomic(path) as temporary:
        save_file(tensors, str(temporary), metadata=header)
    return header["sha256"]


def read_statistics(path: Path, key: Mapping[str, Any], sha256: str | None = None) -> Moments | None:
    """Statistics; None if the file is missing, damaged, or of other images or another network.

    `sha256` is the checksum that its numbers must have, if it is known.
    """
    if not path.exists():
        return None
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in ("mean", "covariance")}
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if header.get("key") != json.dumps(key, sort_keys=True):
        return None
    if _checksum(tensors) != (sha256 or header.get("sha256")):
        return None
    return _from_tensors(key["images"], tensors)


def _find(key: Mapping[str, Any]) -> tuple[Moments, Origin] | None:
    """Stored statistics: from the cache, otherwise from the package."""
    name = statistics_file(key)
    cached = read_statistics(cache_folder() / CACHE / name, key)
    if cached is not None:
        return cached, Origin.CACHE
    included = _read_included(name, key) if name in INCLUDED else None
    return None if included is None else (included, Origin.PACKAGE)


def _read_included(name: str, key: Mapping[str, Any]) -> Moments | None:
    return read_statistics(INCLUDED_FOLDER / name, key, INCLUDED[name])


def _read_key(path: Path) -> dict[str, Any] | None:
    try:
        with safe_open(str(path), "pt") as file:
            return dict(json.loads((file.metadata() or {})["key"]))
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _to_tensors(moments: Moments, dtype: torch.dtype) -> dict[str, Tensor]:
    """The mean, and the covariance's upper triangle, row by row."""
    row, column = torch.triu_indices(len(moments.mean), len(moments.mean))
    return {"mean": moments.mean.cpu(), "covariance": moments.covariance.cpu()[row, column].to(dtype)}


def _from_tensors(count: int, tensors: Mapping[str, Tensor]) -> Moments:
    mean, covariance = tensors["mean"], tensors["covariance"].double()
    if covariance.ndim == 1:  # files of earlier versions contain the whole matrix
        row, column = torch.triu_indices(len(mean), len(mean))
        triangle, covariance = covariance, torch.empty(len(mean), len(mean), dtype=torch.float64)
        covariance[row, column] = covariance[column, row] = triangle
    return Moments.from_statistics(count, mean, covariance)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the numbers; that of the file changes with the order of its header."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        result.update(tensors[name].numpy().tobytes())
    return result.hexdigest()
