"""Data given in Python: tensors, arrays, datasets and iterables of batches, as an `ImageStore`.

Samples of shape (C, H, W) with 1 or 3 channels and at least 8 pixels a side are images and are kept as uint8; floats
must be in [-1, 1] and are rounded. Samples of any other shape are kept as float32, as are all with
`data.as_images=false`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from numbers import Number
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from dualmcmc.config import Data, is_image_shape
from dualmcmc.data import DataSplits, hold_out
from dualmcmc.data.images import ImageSpec, UnreadableImage, from_pil
from dualmcmc.data.store import ImageStore, MemoryStore
from dualmcmc.utils.device import available_memory
from dualmcmc.utils.errors import UserError, first_line, format_value
from dualmcmc.utils.geometry import is_supported_size
from dualmcmc.utils.images import to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress

MEMORY_FRACTION = 0.5  # of the free memory, for samples that are read at the start
READ_TWICE = 8  # items, to detect random ones
CHECKED = 256  # items in the checksum of a dataset that does not fit into memory
TOLERANCE = 0.01  # of floats beyond [-1, 1]
MID_GREY = 127  # as uint8, just below 0 in [-1, 1]


def load_custom(
    cfg: Data, samples: Any, test_samples: Any = None, progress: ProgressFactory = no_progress
) -> tuple[Data, DataSplits]:
    """The settings of data given in Python, and the data; held-out ones as given, otherwise by `data.holdout`."""
    cfg, notes = replace(cfg, source="custom", path=None, test_path=None, split="train"), list[str]()
    train = as_store(samples, cfg, progress, notes)
    test = None if test_samples is None else as_store(test_samples, cfg, progress, notes)
    if test is not None and test.shape[1:] != train.shape[1:]:
        raise UserError(f"training samples have shape {train.shape[1:]}, test samples {test.shape[1:]}.")
    if test is not None:
        cfg = replace(cfg, holdout=0.0)
    elif cfg.holdout > 0:
        train, test = hold_out(train, cfg.holdout)
    return _settings(cfg, train.shape[1:]), DataSplits(train, test, tuple(notes))


def _settings(cfg: Data, shape: tuple[int, ...]) -> Data:
    """`cfg` for samples of this shape."""
    is_square = is_image_shape(shape) and shape[1] == shape[2] and is_supported_size(shape[1])
    if cfg.as_images and is_square:
        return replace(cfg, channels=1 if shape[0] == 1 else 3, size=shape[1], shape=None)
    return replace(cfg, shape=shape)


def as_store(
    samples: Any, cfg: Data, progress: ProgressFactory = no_progress, notes: list[str] | None = None
) -> ImageStore:
    """`samples` as a store. PIL images are cropped, resized and converted as `cfg` says.

    A tensor, an array, or anything with a length whose items are samples, or tuples that begin with one: a list, a
    `torch.utils.data.Dataset`, a column of a Hugging Face dataset. It is read into memory if it fits there. Other
    iterables must yield batches. Of a `DataLoader` the order does not matter, since training has its own.
    """
    if isinstance(samples, ImageStore):
        return samples
    if isinstance(samples, DataLoader):
        samples = _in_order(samples)
    store: ImageStore
    if isinstance(samples, (Tensor, np.ndarray)) and not isinstance(samples, np.memmap):
        store = MemoryStore(_convert(_as_tensor(samples), cfg.as_images).cpu())
    elif _is_map_style(samples):
        store = DatasetStore(samples, cfg)
        if store.nbytes <= MEMORY_FRACTION * available_memory():
            store = MemoryStore(_read(store, progress))
    elif isinstance(samples, Iterable):
        store = MemoryStore(_read_batches(samples, cfg.as_images, progress))
    else:
        raise UserError(
            "training data must be a tensor, an array, a dataset, a list of samples or an iterable of batches, not "
            f"{type(samples).__name__}."
        )
    if len(store) == 0:
        raise UserError("the data given contain no samples.")
    if notes is not None and isinstance(store, MemoryStore) and _all_positive(store.pixels):
        notes.append("no pixel is below mid-grey: floats must be in [-1, 1], not [0, 1]")
    return store


def _in_order(loader: DataLoader[Any]) -> Any:
    """The samples of a loader in the order of its dataset, so that a resumed run finds the same ones."""
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampler = loader.sampler if loader.batch_size is not None else getattr(loader.batch_sampler, "sampler", None)
    if not _takes_all(sampler):
        raise UserError(
            f"the DataLoader has a {type(sampler).__name__}, but training uses all samples, in an order of its own: "
            "pass a dataset, such as a torch.utils.data.Subset."
        )
    if loader.collate_fn is default_collate and _is_map_style(loader.dataset):
        return loader.dataset
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, num_workers=loader.num_workers)


def _takes_all(sampler: Any) -> bool:
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return isinstance(sampler, SequentialSampler)


def _is_map_style(samples: Any) -> bool:
    if isinstance(samples, (dict, str, IterableDataset)):
        return False
    return hasattr(samples, "__getitem__") and hasattr(samples, "__len__")


def _all_positive(pixels: Tensor) -> bool:
    return pixels.dtype == torch.uint8 and int(pixels.min()) > MID_GREY


def _as_tensor(value: Any) -> Tensor:
    """A tensor, an array or a list of numbers as a tensor."""
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise UserError("samples that are lists of numbers must have the same lengths.") from None
        value = value.astype(np.float32) if value.dtype.kind in "if" else value
    if isinstance(value, np.ma.MaskedArray):
        raise UserError("samples must not be masked arrays: fill them first.")
    if isinstance(value, np.ndarray) and value.dtype.kind in "buif":
        native = np.dtype(np.float64) if value.dtype == np.longdouble else value.dtype.newbyteorder("=")
        value = torch.from_numpy(np.require(value, native, ["C", "W"]))  # copied if it is not
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
        kind = f"arrays of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise UserError(f"samples must be dense tensors, arrays or PIL images, not {kind}.")
    return value.detach()


def _convert(batch: Tensor, as_images: bool) -> Tensor:
    """Samples (N, ...) as they are stored: uint8 images (N, C, H, W), or float32."""
    if batch.ndim < 2:
        raise UserError(f"samples must have at least one dimension: data of shape {tuple(batch.shape)} have none.")
    if batch.dtype == torch.uint8:
        if batch.ndim == 3:
            batch = batch[:, None]
        elif batch.ndim == 4 and batch.shape[1] not in (1, 3) and batch.shape[3] in (1, 3):
            batch = batch.movedim(3, 1)
        if not (as_images and is_image_shape(tuple(batch.shape[1:]))):
            raise UserError(
                "uint8 samples must be images with 1 or 3 channels and at least 8 pixels a side, not of shape "
                f"{tuple(batch.shape[1:])}: pass other samples as floats."
            )
        return batch.contiguous()
    if not batch.is_floating_point():
        raise UserError(f"samples must be uint8 images or floats, not {str(batch.dtype).removeprefix('torch.')}.")
    batch = batch.float()
    if not batch.isfinite().all():
        raise UserError("the data given contain values that are not finite in float32.")
    if not (as_images and is_image_shape(tuple(batch.shape[1:]))):
        return batch.contiguous()
    largest = float(batch.abs().max()) if batch.numel() else 0.0
    if largest > 1 + TOLERANCE:
        raise UserError(
            f"images of floats must be in [-1, 1], but these reach {largest:.4g}: rescale them, pass pixels from 0 to "
            "255 as uint8, or set data.as_images=false to keep floats of any size."
        )
    return to_uint8(batch)


class DatasetStore(ImageStore):
    """Samples that a dataset reads or computes when they are needed, from several threads."""

    def __init__(self, dataset: Any, cfg: Data) -> None:
        self._dataset, self._cfg, self._spec = dataset, cfg, ImageSpec.from_config(cfg)
        count = len(dataset)
        if count == 0:
            raise UserError("the dataset given is empty.")
        first = self._item(0)
        self.shape, self.dtype = (count, *first.shape), first.dtype
        for index in range(min(READ_TWICE, count)):
            if not torch.equal(self._item(index), self._item(index)):
                raise UserError(
                    f"item {index} of the dataset is not the same each time it is read, so that no run could be "
                    "repeated: remove random transformations (data.flip=true mirrors images)."
                )

    @cached_property
    def checksum(self) -> str:
        """Of some items only, since reading all may take long."""
        found = hashlib.sha256(repr(self.shape).encode())
        chosen = np.linspace(0, len(self) - 1, min(CHECKED, len(self))).astype(np.int64)
        found.update(self.take(chosen).numpy().tobytes())
        return found.hexdigest()

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        for row, index in zip(out, indices.tolist(), strict=True):
            sample = self._item(index)
            if sample.shape != self.shape[1:] or sample.dtype != self.dtype:
                raise UserError(
                    f"item {index} of the dataset is {_describe(sample)}, the first one {row.dtype} of shape "
                    f"{self.shape[1:]}: all must be alike."
                )
            row[...] = sample.numpy()

    def _item(self, index: int) -> Tensor:
        """One sample as it is stored."""
        try:
            item = self._dataset[index]
        except Exception as error:  # a dataset may raise anything
            raise UserError(
                f"item {index} of the dataset cannot be read ({type(error).__name__}: {first_line(error)})."
            ) from error
        item = _first(item)
        if isinstance(item, Image.Image):
            try:
                item = from_pil(item, self._spec)
            except UnreadableImage as error:
                raise UserError(f"item {index} of the dataset cannot be used: {error}.") from None
        return _convert(_as_tensor(item)[None], self._cfg.as_images)[0].cpu()


def _describe(sample: Tensor) -> str:
    return f"{str(sample.dtype).removeprefix('torch.')} of shape {tuple(sample.shape)}"


def _first(item: Any) -> Any:
    """The sample itself, if it comes with a label."""
    if isinstance(item, dict):
        names = ", ".join(map(format_value, item))
        raise UserError(f"the items of the dataset are dictionaries with {names}: pass one column.")
    if isinstance(item, (tuple, list)) and item and not isinstance(item[0], Number):
        return item[0]
    return item


def _read(store: ImageStore, progress: ProgressFactory) -> Tensor:
    """All samples."""
    samples = torch.empty(store.shape, dtype=store.dtype)
    with progress("reading the data", len(store), "samples") as advance:
        for index in range(len(store)):
            store.read(np.array([index]), samples[index : index + 1].numpy())
            advance(1)
    return samples


def _read_batches(batches: Iterable[Any], as_images: bool, progress: ProgressFactory) -> Tensor:
    """All batches of an iterable as one tensor."""
    limit, size = MEMORY_FRACTION * available_memory(), 0
    parts: list[Tensor] = []
    with progress("reading the data", None, "samples") as advance:
        for batch in batches:
            batch = _first(batch)
            if isinstance(batch, Image.Image) or (isinstance(batch, Tensor) and batch.ndim < 2):
                raise UserError("an iterable must yield batches, not single samples: pass a list, or a dataset.")
            parts.append(_convert(_as_tensor(batch), as_images).cpu())
            if parts[-1].shape[1:] != parts[0].shape[1:] or parts[-1].dtype != parts[0].dtype:
                raise UserError(
                    f"the iterable yields samples that differ: {_describe(parts[0][0])}, {_describe(parts[-1][0])}."
                )
            size += parts[-1].nbytes
            if size > limit / 2:  # joining them takes as much again
                raise UserError(
                    f"the iterable does not fit into memory (more than {size / 1e9:.1f} GB): pass a dataset with a "
                    "length, which is read as needed."
                )
            advance(len(parts[-1]))
    if not parts:
        raise UserError("the iterable yields no batches.")
    return torch.cat(parts)
