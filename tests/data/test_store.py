import hashlib

import numpy as np
import pytest
import torch

from dualmcmc.data import pack
from dualmcmc.data.store import ConcatStore, MemoryStore, SubsetStore
from tests.data.makers import pixels

IMAGES = pixels(20, 8).transpose(0, 3, 1, 2).copy()


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "a.pack"
    pack.write(path, {"train": IMAGES[:15], "test": IMAGES[15:]}, (3, 8, 8), {"crop": "center", "name": "x"})
    return path


def test_all_stores_return_the_same_images(packed):
    memory = MemoryStore(torch.from_numpy(IMAGES))
    splits, _ = pack.read(packed)
    concat = ConcatStore([splits["train"], splits["test"]])
    chosen = np.array([7, 0, 19, 7, 14, 15])
    for store in (
        memory,
        concat,
        SubsetStore(memory, np.arange(20)),
        ConcatStore([SubsetStore(memory, np.arange(9)), SubsetStore(concat, np.arange(9, 20))]),
    ):
        assert len(store) == 20
        assert store.nbytes == IMAGES.nbytes
        assert np.array_equal(store.take(chosen).numpy(), IMAGES[chosen])
        assert np.array_equal(store.tensor().numpy(), IMAGES)
        assert np.array_equal(store.first(3).numpy(), IMAGES[:3])
        assert np.array_equal(store.first(99).numpy(), IMAGES)
    backwards = SubsetStore(concat, np.arange(20)[::-1])
    assert np.array_equal(backwards.take([0, 1]).numpy(), IMAGES[[19, 18]])


def test_checksum_is_the_sha256_of_the_pixels(packed):
    splits, _ = pack.read(packed)
    expected = hashlib.sha256(IMAGES[:15].tobytes()).hexdigest()
    assert splits["train"].checksum == MemoryStore(torch.from_numpy(IMAGES[:15])).checksum == expected
    forwards, backwards = (SubsetStore(splits["train"], np.arange(3)[::step]) for step in (1, -1))
    assert forwards.checksum != backwards.checksum


def test_checksum_depends_on_pixels_and_order(packed):
    memory = MemoryStore(torch.from_numpy(IMAGES))
    changed = MemoryStore(torch.from_numpy(IMAGES ^ 1))
    some = np.arange(3)
    assert SubsetStore(memory, some).checksum != SubsetStore(changed, some).checksum
    splits, _ = pack.read(packed)
    concat = ConcatStore([splits["train"], splits["test"]]).checksum
    assert concat == ConcatStore([MemoryStore(splits["train"].tensor()), MemoryStore(splits["test"].tensor())]).checksum
    assert concat != ConcatStore([splits["train"], MemoryStore(splits["test"].tensor() ^ 1)]).checksum
    assert concat != ConcatStore([splits["test"], splits["train"]]).checksum


def test_index_out_of_range(packed):
    for store in (MemoryStore(torch.from_numpy(IMAGES[:15])), pack.read(packed)[0]["train"]):
        for index in (-1, 15):
            with pytest.raises(IndexError):
                store.take([index])
