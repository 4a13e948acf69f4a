import typing

import numpy as np
from sklearn.datasets import load_digits

from dualmcmc.config import DatasetName
from dualmcmc.data.catalog import CATALOG, expected_counts, read_digits
from dualmcmc.data.images import ImageSpec


def test_names_are_those_of_the_config():
    assert {*CATALOG, "folder", "custom"} == set(typing.get_args(DatasetName))


def test_digits_are_scikit_learns(tmp_path):
    images = np.stack([pixels for _, pixels in read_digits(tmp_path)["train"].items(ImageSpec())])
    assert images.shape == (1797, 8, 8, 1)
    assert (images.min(), images.max()) == (0, 255)
    assert np.abs(images[..., 0] * (16 / 255) - load_digits().images).max() < 0.04


def test_expected_counts():
    assert expected_counts("celeba", ["train"]) == {"train": 202_599}  # without the partition file
    assert expected_counts("celeba", ["train", "valid", "test"])["train"] == 162_770
    assert expected_counts("svhn", ["train"]) == {"train": 73_257, "test": 26_032}
    assert expected_counts("svhn", ["extra"])["extra"] == 531_131
    assert expected_counts("folder", ["train"]) == {}
