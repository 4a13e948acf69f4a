import sys

import pytest

from dualmcmc.utils.errors import UserError
from tests.data.formats.common import IMAGES, assert_equal, load, read
from tests.data.makers import image_lmdb, pixels


def test_missing_package_is_named(tmp_path, monkeypatch):
    path = image_lmdb(tmp_path / "a", IMAGES)
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(UserError, match=r"pip install 'dualmcmc\[data\]'"):
        read(path)


def test_lsun(cache):
    folder = cache / "lsun-church"
    folder.mkdir()
    train, test = pixels(6, (32, 40)), pixels(2, (40, 32), seed=1)
    image_lmdb(folder / "church_outdoor_train_lmdb", train)
    image_lmdb(folder / "church_outdoor_val_lmdb", test)
    assert_equal(load(source="lsun-church"), (train[:, :, 4:36], test[:, 4:36]))
    only = load(source="lsun-church", path=str(folder / "church_outdoor_train_lmdb"))[:1]
    assert_equal(only, (train[:, :, 4:36],))


def test_lsun_zip_must_be_unpacked(cache):
    (cache / "lsun-church").mkdir()
    (cache / "lsun-church" / "church_outdoor_train_lmdb.zip").write_bytes(b"a zip")
    with pytest.raises(UserError, match=r"unpack '.*church_outdoor_train_lmdb\.zip' first"):
        load(source="lsun-church")


def test_lsun_validation_lmdb_is_a_test_split(tmp_path):
    image_lmdb(tmp_path / "church_outdoor_val_lmdb", pixels(2))
    image_lmdb(tmp_path / "interval", pixels(3))
    for name, split, count in (("church_outdoor_val_lmdb", "test", 2), ("interval", "train", 3)):
        images, _ = load(source="lsun-church", path=str(tmp_path / name), split=split)
        assert len(images) == count
