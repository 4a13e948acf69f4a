"""What a config asks for."""

import numpy as np
import pytest
import torch

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data import pack
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_sources, pack_sources
from dualmcmc.data.store import Subset
from dualmcmc.errors import UserError
from tests.data import makers
from tests.data.makers import pixels


@pytest.fixture
def folder(tmp_path):
    return makers.image_folder(tmp_path / "in", pixels(10, 16))


def settings(path, **changes):
    return Data(source="folder", path=str(path), size=16, **changes)


def test_the_split_is_fixed_and_whole():
    cfg = Data(source="digits", size=8, channels=1, holdout=0.2)
    first, second = data.load(cfg), data.load(cfg)
    assert torch.equal(first.train.tensor(), second.train.tensor())
    assert (len(first.train), len(first.test)) == (1438, 359)
    rows = torch.cat([first.train.tensor(), first.test.tensor()]).flatten(1).sum(1).sort().values
    assert torch.equal(
        rows, data.load(Data(source="digits", size=8, channels=1)).train.tensor().flatten(1).sum(1).sort().values
    )


def test_the_split_is_the_same_for_ever():
    """Known indices: a change of the split would make held-out images of old runs training images of new ones."""
    store = data.load(Data(source="digits", size=8, channels=1, holdout=0.2)).test
    assert isinstance(store, Subset)
    assert store.indices[:6].tolist() == [1357, 680, 568, 811, 563, 1796]


def test_a_folder_with_and_without_held_out_images(folder, tmp_path):
    assert data.load(settings(folder)).test is None
    other = makers.image_folder(tmp_path / "other", pixels(3, 16, seed=5))
    both = data.load(settings(folder, test_path=str(other)))
    assert (len(both.train), len(both.test)) == (10, 3)
    packed, note = tmp_path / "both.pack", {"crop": "center", "resize": "lanczos"}
    parts = pixels(6, 16).transpose(0, 3, 1, 2)
    pack.write(packed, {"train": parts[:4], "test": parts[4:]}, (3, 16, 16), note)
    both = data.load(settings(folder, test_path=str(packed)))
    assert np.array_equal(both.test.tensor().numpy(), parts[4:])
    held = data.load(settings(folder, holdout=0.3))
    assert (len(held.train), len(held.test)) == (7, 3)
    assert held.held_out()[1] == "held-out images"
    assert data.load(settings(folder)).held_out()[1] == "training images"


def test_a_packed_file_gives_what_its_folder_gives(folder, tmp_path):
    path = tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, Fit(16, 3), {})
    for changes in ({}, {"holdout": 0.3}):
        one, two = data.load(settings(folder, **changes)), data.load(settings(path, **changes))
        for mine, theirs in zip(one[:2], two[:2], strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.tensor(), theirs.tensor())
            assert mine is None or mine.checksum == theirs.checksum  # a run may go on with either
    assert isinstance(data.load(settings(path, holdout=0.3)).train, Subset)  # not read into memory


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 32}, "data.size=16"),
        ({"crop": "none"}, "data.crop=center"),
        ({"resize": "box"}, "data.resize=lanczos"),
        ({"channels": 1}, "data.channels=3"),
    ],
)
def test_a_file_packed_otherwise_is_refused(folder, tmp_path, changes, words):
    path = tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, Fit(16, 3), {})
    cfg = Data(**{"source": "folder", "path": str(path), "size": 16, **changes})
    with pytest.raises(UserError, match=words):
        data.load(cfg)


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (lambda f: Data(source="folder"), r"needs data\.path"),
        (lambda f: settings(f, holdout=0.01), "leaves nothing"),
        (lambda f: settings(f, split="valid"), "no split 'valid'"),
        (lambda f: settings(f, split="train+trial"), "no split 'trial' there, only train"),
        (lambda f: settings(f, split="train+train"), "twice"),
        (lambda f: settings(f, split="train+"), "empty part"),
        (lambda f: settings(f, test_path=str(f), holdout=0.1), "choose one"),
        (lambda f: settings(f / "absent"), "nothing at"),
    ],
)
def test_what_cannot_be(folder, cfg, words):
    with pytest.raises(UserError, match=words):
        data.load(cfg(folder))


def test_a_share_held_out_of_a_set_with_a_test_split(cache):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1))
    with pytest.raises(UserError, match=r"data\.holdout=0"):
        data.load(Data(source="mnist", size=28, channels=1, holdout=0.1))


def test_bad_files_can_be_left_out(folder):
    (folder / "000003.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"000003\.png"):
        data.load(settings(folder))
    images = data.load(settings(folder, skip_bad=True))
    assert len(images.train) == 9
    (note,) = images.notes  # never silently
    assert "left out: 1 image cannot be used" in note
    assert "000003.png" in note
    assert data.describe(settings(folder, skip_bad=True), images)["notes"] == [note]


def test_the_record_that_goes_with_every_number(folder):
    cfg = settings(folder, crop="none", resize="bilinear")
    record = data.describe(cfg, data.load(cfg))
    assert record["crop"] == "none"
    assert record["resize"] == "bilinear"
    assert (record["source"], record["split"], record["size"], record["images"]) == ("folder", "train", 16, 10)
    assert record["checksum"] == data.fingerprint(data.load(cfg).train)


def test_the_order_of_images_counts_in_a_fingerprint(folder):
    before = data.fingerprint(data.load(settings(folder)).train)
    (folder / "000000.png").rename(folder / "zzz.png")
    assert data.fingerprint(data.load(settings(folder)).train) != before
