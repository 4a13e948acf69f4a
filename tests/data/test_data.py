"""data.load: the training and test images of a config."""

import numpy as np
import pytest
import torch

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data import pack
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import open_sources, pack_sources
from dualmcmc.data.store import SubsetStore
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.makers import pixels

DIGITS = {"source": "digits", "size": 8, "channels": 1}


@pytest.fixture
def folder(tmp_path):
    return makers.image_folder(tmp_path / "in", pixels(10, 16))


def settings(path, **changes):
    return Data(source="folder", path=str(path), size=16, **changes)


def test_holdout_is_a_partition():
    cfg = Data(**DIGITS, holdout=0.2)
    first, second = data.load(cfg), data.load(cfg)
    assert torch.equal(first.train.tensor(), second.train.tensor())
    assert (len(first.train), len(first.test)) == (1438, 359)
    sums = torch.cat([first.train.tensor(), first.test.tensor()]).flatten(1).sum(1).sort().values
    assert torch.equal(sums, data.load(Data(**DIGITS)).train.tensor().flatten(1).sum(1).sort().values)


def test_holdout_never_changes():
    """Otherwise held-out images of old runs would be training images of new ones."""
    store = data.load(Data(**DIGITS, holdout=0.2)).test
    assert isinstance(store, SubsetStore)
    assert store.indices[:6].tolist() == [1357, 680, 568, 811, 563, 1796]


def test_test_images_of_a_folder(folder, tmp_path):
    assert data.load(settings(folder)).test is None
    other = makers.image_folder(tmp_path / "other", pixels(3, 16, seed=5))
    both = data.load(settings(folder, test_path=str(other)))
    assert (len(both.train), len(both.test)) == (10, 3)
    packed, info = tmp_path / "both.pack", {"crop": "center", "resize": "lanczos"}
    parts = pixels(6, 16).transpose(0, 3, 1, 2)
    pack.write(packed, {"train": parts[:4], "test": parts[4:]}, (3, 16, 16), info)
    both = data.load(settings(folder, test_path=str(packed)))
    assert np.array_equal(both.test.tensor().numpy(), parts[4:])
    held = data.load(settings(folder, holdout=0.3))
    assert (len(held.train), len(held.test)) == (7, 3)
    assert held.test_or_train() == (held.test, "held-out images")
    images = data.load(settings(folder))
    assert images.test_or_train() == (images.train, "training images")


def test_packed_file_and_folder_give_the_same(folder, tmp_path):
    path = tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, ImageSpec(16, 3), {})
    for changes in ({}, {"holdout": 0.3}):
        one, two = data.load(settings(folder, **changes)), data.load(settings(path, **changes))
        for mine, theirs in zip(one[:2], two[:2], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.tensor(), theirs.tensor())
            assert mine is None or mine.checksum == theirs.checksum  # a run can be resumed with either
    assert isinstance(data.load(settings(path, holdout=0.3)).train, SubsetStore)  # not read into memory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 32}, "data.size=16"),
        ({"crop": "none"}, "data.crop=center"),
        ({"resize": "box"}, "data.resize=lanczos"),
        ({"channels": 1}, "data.channels=3"),
    ],
)
def test_packed_file_with_other_settings_is_refused(folder, tmp_path, changes, message):
    path = tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, ImageSpec(16, 3), {})
    cfg = Data(**{"source": "folder", "path": str(path), "size": 16, **changes})
    with pytest.raises(UserError, match=message):
        data.load(cfg)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (lambda f: Data(source="folder"), r"needs data\.path"),
        (lambda f: settings(f, holdout=0.01), "leaves no training or no test images"),
        (lambda f: settings(f, split="valid"), "no split 'valid'"),
        (lambda f: settings(f, split="train+trial"), "no split 'trial', only train"),
        (lambda f: settings(f, split="train+train"), "repeated"),
        (lambda f: settings(f, split="train+"), "empty"),
        (lambda f: settings(f, test_path=str(f), holdout=0.1), "choose one"),
        (lambda f: settings(f / "absent"), "does not exist"),
    ],
)
def test_invalid_settings(folder, cfg, message):
    with pytest.raises(UserError, match=message):
        data.load(cfg(folder))


def test_holdout_of_a_dataset_with_a_test_split_is_refused(cache):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1))
    with pytest.raises(UserError, match=r"data\.holdout=0"):
        data.load(Data(source="mnist", size=28, channels=1, holdout=0.1))


def test_skipped_files_are_noted(folder):
    (folder / "000003.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"000003\.png"):
        data.load(settings(folder))
    images = data.load(settings(folder, skip_bad=True))
    assert len(images.train) == 9
    (note,) = images.notes
    assert "skipped: 1 image cannot be used" in note
    assert "000003.png" in note
    assert data.describe(settings(folder, skip_bad=True), images)["notes"] == [note]


def test_describe(folder):
    cfg = settings(folder, crop="none", resize="bilinear")
    images = data.load(cfg)
    record = data.describe(cfg, images)
    assert (record["crop"], record["resize"]) == ("none", "bilinear")
    assert (record["source"], record["split"], record["size"], record["images"]) == ("folder", "train", 16, 10)
    assert record["checksum"] == data.fingerprint(images.train)


def test_fingerprint_depends_on_the_order(folder):
    before = data.fingerprint(data.load(settings(folder)).train)
    (folder / "000000.png").rename(folder / "zzz.png")
    assert data.fingerprint(data.load(settings(folder)).train) != before
