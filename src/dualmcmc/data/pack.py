"""Packed files: all images of a dataset as raw pixels in one file, with fast random access.

A packed file is a safetensors file. It has one uint8 tensor (N, C, H, W) per split, and its header describes what was
packed and how, with a SHA-256 of each split's pixels. It contains no code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data.store import ImageStore
from dualmcmc.utils.errors import UserError, first_line
from dualmcmc.utils.files import atomic, remove_stale_temporaries

SUFFIX = ".pack"
FORMAT = "dualmcmc images"
VERSION = 1
HEADER = 1 << 16  # bytes reserved for the header, which is written last
MAX_HEADER = 1 << 24  # bytes of a header that is read
CHUNK = 1 << 24  # bytes hashed at a time


class PackedStore(ImageStore):
    """One split of a packed file, read as needed."""

    def __init__(self, path: Path, shape: tuple[int, int, int, int], start: int, checksum: str) -> None:
        self.path, self.shape, self._start, self._checksum = path, shape, start, checksum

    @cached_property
    def _file(self) -> BinaryIO:
        return open(self.path, "rb", buffering=0)

    @property
    def checksum(self) -> str:
        """The checksum recorded when the file was packed; `is_intact` verifies it."""
        return self._checksum

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        stride = self.nbytes // len(self)
        for row, index in zip(out.reshape(len(indices), stride), indices.tolist(), strict=True):
            self._read_into(row, index * stride)

    def is_intact(self) -> bool:
        """Whether the pixels still have the recorded checksum."""
        digest = hashlib.sha256()
        for offset in range(0, self.nbytes, CHUNK):
            part = np.empty(min(CHUNK, self.nbytes - offset), np.uint8)
            self._read_into(part, offset)
            digest.update(part.data)
        return digest.hexdigest() == self._checksum

    def tensor(self) -> Tensor:  # noqa: D102
        out = np.empty(self.nbytes, np.uint8)
        self._read_into(out, 0)
        return torch.from_numpy(out).reshape(self.shape)

    def _read_into(self, out: np.ndarray, offset: int) -> None:
        """Fill `out` with the bytes from `offset`; thread-safe."""
        view, position = memoryview(out.data), self._start + offset
        while view:
            count = os.preadv(self._file.fileno(), [view], position)
            if count == 0:
                raise UserError(f"'{self.path}' was truncated while it was being read.")
            view, position = view[count:], position + count


def write(
    path: Path,
    splits: Mapping[str, Iterable[np.ndarray]],
    shape: tuple[int, int, int],
    info: dict[str, Any] | Callable[[], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Write (C, H, W) uint8 images, split by split, in bounded memory; returns count and SHA-256 of each split.

    `info` is stored in the header; a function is called after the last image.
    """
    tensors: dict[str, Any] = {}
    written: dict[str, dict[str, Any]] = {}
    remove_stale_temporaries(path)
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(b"\0" * HEADER)
        for split, images in splits.items():
            begin, digest, count = file.tell() - HEADER, hashlib.sha256(), 0
            for image in images:
                pixels = np.ascontiguousarray(image)
                if pixels.shape != shape or pixels.dtype != np.uint8:
                    raise ValueError(f"expected uint8 images of shape {shape}, got {pixels.dtype} {pixels.shape}")
                file.write(pixels.data)
                digest.update(pixels.data)
                count += 1
            if count == 0:
                raise UserError(f"nothing to pack: the split '{split}' contains no images.")
            end = file.tell() - HEADER
            tensors[split] = {"dtype": "U8", "shape": [count, *shape], "data_offsets": [begin, end]}
            written[split] = {"images": count, "sha256": digest.hexdigest()}
        info = info() if callable(info) else info
        metadata = {"format": FORMAT, "version": str(VERSION), "info": json.dumps({**info, "splits": written})}
        header = json.dumps({"__metadata__": metadata, **tensors}).encode()
        if len(header) > HEADER - 8:
            raise ValueError("`info` is too long for the header")
        file.seek(0)
        file.write((HEADER - 8).to_bytes(8, "little") + header.ljust(HEADER - 8))
    return written


def is_pack(path: Path) -> bool:
    """Whether `path` is a file with the suffix of a packed file."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def read(path: Path) -> tuple[dict[str, PackedStore], dict[str, Any]]:
    """The splits of a packed file, and the `info` it was written with."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= MAX_HEADER else {}
            size = file.seek(0, os.SEEK_END)
        metadata = header.pop("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise UserError(f"'{path}' is not a packed file: create one with 'dualmcmc data pack'.")
        if int(metadata["version"]) > VERSION:
            raise UserError(f"'{path}' was packed by a newer dualmcmc: pack the images again, or update dualmcmc.")
        info = json.loads(metadata["info"])
        _check_info(info)
        for entry in header.values():
            if not all(type(number) is int for number in (*entry["data_offsets"], *entry["shape"])):
                raise ValueError("a size is not an integer")
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < needed:
            raise UserError(f"'{path}' is truncated: {size:,} of {needed:,} bytes. Fetch or pack it again.")
        splits = {}
        for split, entry in header.items():
            begin, end = entry["data_offsets"]
            count, channels, height, width = entry["shape"]
            if entry["dtype"] != "U8" or min(entry["shape"]) < 1 or begin < 0 or channels not in (1, 3):
                raise ValueError("a split does not contain images")
            if end - begin != count * channels * height * width:
                raise ValueError("the size of a split does not match its shape")
            checksum = str(info["splits"][split]["sha256"])
            splits[split] = PackedStore(path, (count, channels, height, width), 8 + length + begin, checksum)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}.") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"'{path}' is a damaged packed file: {first_line(error)}.") from None
    if not splits:
        raise UserError(f"'{path}' is a damaged packed file: it contains no split.")
    return splits, info


def _check_info(info: Any) -> None:
    """Check the types of the entries that are used, and rename an old one."""
    if not isinstance(info, dict):
        raise ValueError("`info` is not a dictionary")
    if "left_out" in info:  # its name in older files
        info["skipped"] = info.pop("left_out")
    if not all(isinstance(info.get(key), str | None) for key in ("name", "crop", "resize", "stamp", "source")):
        raise ValueError("an entry of `info` is not a string")
    skipped = info.get("skipped", {})
    if not isinstance(skipped, dict) or not all(isinstance(text, str) for text in skipped.values()):
        raise ValueError("`skipped` does not contain one text per split")
