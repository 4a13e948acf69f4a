import os
import pickle
import tarfile

import numpy as np
import pytest

from dualmcmc.data.formats.cifar import read_cifar10, read_cifar100
from dualmcmc.data.images import ImageSpec
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.formats.common import assert_equal, load
from tests.data.makers import pixels
from tests.data.test_safe_pickle import Hostile


def test_cifar10_folder_and_archive(cache, tmp_path):
    splits = pixels(11), pixels(4, seed=1)
    makers.cifar10(cache / "cifar10", *splits)
    assert_equal(load(source="cifar10"), splits)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(cache / "cifar10" / "cifar-10-batches-py", "cifar-10-batches-py")
    assert_equal(load(source="cifar10", path=str(tmp_path / "cifar-10-python.tar.gz")), splits)
    assert_equal(load(source="cifar10", path=str(tmp_path)), splits)  # the folder that contains it


def test_cifar10_as_png(cache):
    splits = pixels(10), pixels(4, seed=1)
    folder = cache / "cifar10"
    folder.mkdir()
    for number, part in enumerate(np.array_split(splits[0], 5), 1):
        (folder / f"data_batch_{number}.png").write_bytes(makers.encoded(part.reshape(-1, 1024, 3)))
    (folder / "test_batch.png").write_bytes(makers.encoded(splits[1].reshape(-1, 1024, 3)))
    assert_equal(load(source="cifar10"), splits)
    (folder / "test_batch.png").write_bytes(makers.encoded(pixels(1, 16)[0]))
    with pytest.raises(UserError, match="1024 wide"):
        load(source="cifar10")


def test_missing_batch_is_named(cache):
    makers.cifar10(cache / "cifar10", pixels(10), pixels(4))
    (cache / "cifar10" / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(UserError, match="data_batch_3 missing"):
        load(source="cifar10")


def test_cifar100(cache):
    splits = pixels(5), pixels(3, seed=1)
    folder = cache / "cifar100" / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, images in zip(("train", "test"), splits, strict=True):
        (folder / name).write_bytes(makers.cifar_batch(images, protocol=4))
    assert_equal(load(source="cifar100"), splits)


def test_pickle_without_images_is_refused(tmp_path):
    for value in ([1, 2], {"data": 3}, {"data": np.zeros((2, 5), np.uint8)}):
        (tmp_path / "test").write_bytes(pickle.dumps(value, 2))
        with pytest.raises(UserError, match="not a CIFAR batch"):
            next(read_cifar100(tmp_path)["test"].items(ImageSpec()))


def test_hostile_pickle_is_refused(tmp_path):
    images = pixels(5)
    for number in range(1, 5):
        (tmp_path / f"data_batch_{number}").write_bytes(makers.cifar_batch(images))
    (tmp_path / "data_batch_5").write_bytes(pickle.dumps(Hostile(os.system, f"touch {tmp_path / 'ran'}"), 2))
    with pytest.raises(UserError, match="refused"):
        next(read_cifar10(tmp_path)["train"].items(ImageSpec()))
    assert not (tmp_path / "ran").exists()
