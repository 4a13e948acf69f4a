"""Small files in the formats in which datasets are published."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def pixels(count: int, size: int | tuple[int, int] = 32, channels: int = 3, seed: int = 0) -> np.ndarray:
    """(N, H, W, C) random uint8 pixels."""
    height, width = (size, size) if isinstance(size, int) else size
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, channels), dtype=np.uint8)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, kind)
    return buffer.getvalue()


def image_folder(path: Path, images: np.ndarray, suffix: str = "png") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        (path / f"{index:06d}.{suffix}").write_bytes(encoded(image, "JPEG" if suffix == "jpg" else "PNG"))
    return path


def image_zip(path: Path, images: np.ndarray, inside: str = "images") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for index, image in enumerate(images):
            archive.writestr(f"{inside}/{index:06d}.png", encoded(image))
    return path


def idx(images: np.ndarray) -> bytes:
    sides = b"".join(side.to_bytes(4, "big") for side in images.shape[:3])
    return b"\0\0\x08\x03" + sides + images.tobytes()


def mnist(path: Path, train: np.ndarray, test: np.ndarray) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(train)))
    (path / "t10k-images-idx3-ubyte").write_bytes(idx(test))
    return path


def cifar_batch(images: np.ndarray, protocol: int = 2) -> bytes:
    rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return pickle.dumps({b"batch_label": b"a batch", b"labels": [1] * len(images), b"data": rows}, protocol)


def cifar10(path: Path, train: np.ndarray, test: np.ndarray) -> Path:
    inside = path / "cifar-10-batches-py"
    inside.mkdir(parents=True)
    for number, part in enumerate(np.array_split(train, 5), 1):
        (inside / f"data_batch_{number}").write_bytes(cifar_batch(part))
    (inside / "test_batch").write_bytes(cifar_batch(test))
    return path


def image_lmdb(path: Path, images: np.ndarray) -> Path:
    """As LSUN: hexadecimal keys, encoded images as values."""
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for index, image in enumerate(images):
            transaction.put(f"{index:040x}".encode(), encoded(image, "PNG"))
    return path


def celeba(path: Path, count: int = 10, size: tuple[int, int] = (218, 178), partition: bool = True) -> Path:
    """`count` images: the first half train, the last two test, the others valid."""
    image_folder(path / "img_align_celeba", pixels(count, size), "jpg")
    if partition:
        codes = [0 if i < count // 2 else 1 if i < count - 2 else 2 for i in range(count)]
        lines = [f"{index:06d}.jpg {code}" for index, code in enumerate(codes)]
        (path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return path
