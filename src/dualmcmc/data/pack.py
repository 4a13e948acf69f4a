"""The packed file: all images of a set as raw bytes in one file, read in any order at the disk's speed.

It is a safetensors file: one uint8 tensor (N, C, H, W) a split, and in its header a note of what was
packed and how, with a SHA-256 of each split's pixels. Nothing in it is code.
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

from dualmcmc.data.store import Store
from dualmcmc.errors import UserError, first_line
from dualmcmc.files import atomic, sweep

ENDING = ".pack"
FORMAT = "dualmcmc images"
VERSION = 1
HEADER = 1 << 16  # bytes kept free for the header, which is written last


class Packed(Store):
    """One split of a packed file; its memory is that of the images asked for."""

    def __init__(self, path: Path, shape: tuple[int, int, int, int], start: int, checksum: str) -> None:
        self.path, self.shape, self._start, self._checksum = path, shape, start, checksum

    @cached_property
    def _file(self) -> BinaryIO:
        return open(self.path, "rb", buffering=0)

    @property
    def checksum(self) -> str:
        """As noted when the file was packed; `dualmcmc data check FILE` sees whether it still holds."""
        return self._checksum

    def read(self, indices: np.ndarray, out: np.ndarray) -> None:  # noqa: D102
        stride = self.nbytes // len(self)
        for row, index in zip(out.reshape(len(indices), stride), indices.tolist(), strict=True):
            self._fill(row, index * stride)

    def is_intact(self) -> bool:
        """Whether the pixels are still those that were packed."""
        digest, size = hashlib.sha256(), 1 << 24
        for offset in range(0, self.nbytes, size):
            part = np.empty(min(size, self.nbytes - offset), np.uint8)
            self._fill(part, offset)
            digest.update(part.data)
        return digest.hexdigest() == self._checksum

    def tensor(self) -> Tensor:  # noqa: D102
        out = np.empty(self.nbytes, np.uint8)
        self._fill(out, 0)
        return torch.from_numpy(out).reshape(self.shape)

    def _fill(self, out: np.ndarray, offset: int) -> None:
        """Bytes from `offset` on, as many as `out` holds; safe from several threads at once."""
        view, at = memoryview(out.data), self._start + offset
        while view:
            got = os.preadv(self._file.fileno(), [view], at)
            if got == 0:
                raise UserError(f"'{self.path}' was cut short while it was read.")
            view, at = view[got:], at + got


def write(
    path: Path,
    splits: Mapping[str, Iterable[np.ndarray]],
    shape: tuple[int, int, int],
    info: dict[str, Any] | Callable[[], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Write (C, H, W) images, split by split, in bounded memory; returns count and sha256 of each split.

    `info` goes into the header; a function is called when all images have been through.
    """
    tensors: dict[str, Any] = {}
    made: dict[str, dict[str, Any]] = {}
    sweep(path)
    with atomic(path) as temporary, open(temporary, "wb") as file:
        file.write(b"\0" * HEADER)
        for split, images in splits.items():
            begin, digest, count = file.tell() - HEADER, hashlib.sha256(), 0
            for image in images:
                content = np.ascontiguousarray(image)
                if content.shape != shape or content.dtype != np.uint8:
                    raise ValueError(f"an image of {content.dtype} {content.shape} among those of {shape}")
                file.write(content.data)
                digest.update(content.data)
                count += 1
            if count == 0:
                raise UserError(f"there is nothing to pack: the split '{split}' holds no images.")
            end = file.tell() - HEADER
            tensors[split] = {"dtype": "U8", "shape": [count, *shape], "data_offsets": [begin, end]}
            made[split] = {"images": count, "sha256": digest.hexdigest()}
        facts = info() if callable(info) else info
        note = {"format": FORMAT, "version": str(VERSION), "info": json.dumps({**facts, "splits": made})}
        header = json.dumps({"__metadata__": note, **tensors}).encode()
        if len(header) > HEADER - 8:
            raise ValueError("the note is too long for the header")
        file.seek(0)
        file.write((HEADER - 8).to_bytes(8, "little") + header.ljust(HEADER - 8))
    return made


def is_pack(path: Path) -> bool:
    """Whether a file looks like a packed one."""
    return path.suffix.lower() == ENDING and path.is_file()


def read(path: Path) -> tuple[dict[str, Packed], dict[str, Any]]:
    """The splits of a packed file, and the note of how they were made."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= 1 << 24 else {}
            size = file.seek(0, os.SEEK_END)
        note = header.pop("__metadata__", {})
        if note.get("format") != FORMAT:
            raise UserError(f"'{path}' is not a packed file: 'dualmcmc data pack' makes one.")
        if int(note["version"]) > VERSION:
            raise UserError(f"'{path}' was packed by a newer dualmcmc: pack it again, or update.")
        info = json.loads(note["info"])
        _check_note(info)
        splits = {}
        for entry in header.values():
            if not all(type(number) is int for number in (*entry["data_offsets"], *entry["shape"])):
                raise ValueError("sizes that are not whole numbers")
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size < needed:
            raise UserError(f"'{path}' is cut short: {size:,} bytes of {needed:,}. Make it again.")
        for split, entry in header.items():
            begin, end = entry["data_offsets"]
            count, channels, height, width = entry["shape"]
            if entry["dtype"] != "U8" or min(entry["shape"]) < 1 or begin < 0 or channels not in (1, 3):
                raise ValueError("a split that is not images")
            if end - begin != count * channels * height * width:
                raise ValueError("a split whose size is wrong")
            checksum = str(info["splits"][split]["sha256"])
            splits[split] = Packed(path, (count, channels, height, width), 8 + length + begin, checksum)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}.") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"'{path}' is a damaged packed file: {first_line(error)}.") from None
    if not splits:
        raise UserError(f"'{path}' is a damaged packed file: it holds no split.")
    return splits, info


def _check_note(info: Any) -> None:
    """What others read of the note must be of the kind that `write` was given."""
    if not isinstance(info, dict):
        raise ValueError("a note that is none")
    if not all(isinstance(info.get(key), str | None) for key in ("name", "crop", "resize", "stamp", "source")):
        raise ValueError("a note of another kind")
    left_out = info.get("left_out", {})
    if not isinstance(left_out, dict) or not all(isinstance(text, str) for text in left_out.values()):
        raise ValueError("a note of another kind")
