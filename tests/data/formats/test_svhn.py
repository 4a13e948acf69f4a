import numpy as np
import pytest
from scipy.io import savemat

from dualmcmc.utils.errors import UserError
from tests.data.formats.common import assert_equal, load
from tests.data.makers import pixels


def test_svhn(cache):
    splits = {"train": pixels(5), "test": pixels(3, seed=1), "extra": pixels(4, seed=2)}
    folder = cache / "svhn"
    folder.mkdir()
    for name, images in splits.items():
        savemat(folder / f"{name}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.ones((len(images), 1))})
    assert_equal(load(source="svhn"), (splits["train"], splits["test"]))
    both, test = load(source="svhn", split="train+extra")
    assert np.array_equal(both, np.concatenate([splits["train"], splits["extra"]]))
    assert np.array_equal(test, splits["test"])
    only, nothing = load(source="svhn", split="test")
    assert np.array_equal(only, splits["test"])
    assert nothing is None
    savemat(folder / "train_32x32.mat", {"y": np.ones(3)})
    with pytest.raises(UserError, match="array 'X'"):
        load(source="svhn")
    (folder / "train_32x32.mat").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"train_32x32\.mat"):
        load(source="svhn")
