"""Which files of a dataset are used: packed files, official files, or both."""

import shutil

import numpy as np
import pytest
from scipy.io import savemat

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data import pack
from dualmcmc.data.catalog import CATALOG
from dualmcmc.data.check import check
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import is_complete, open_sources, pack_filename, pack_sources
from dualmcmc.data.store import MemoryStore
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.formats.common import assert_equal, load
from tests.data.makers import pixels


def channels_first(images):
    return images.transpose(0, 3, 1, 2)


@pytest.fixture
def fetched_cifar10(cache):
    """A small packed file, as `fetch` creates it."""
    path = cache / "cifar10" / "cifar10.pack"
    path.parent.mkdir()
    images = channels_first(pixels(5))
    pack.write(path, {"train": images, "test": images}, (3, 32, 32), {"crop": None, "name": "cifar10"})
    return path


@pytest.mark.parametrize("name", [name for name in CATALOG if name != "digits"])
def test_missing_dataset_names_the_command(cache, name):
    for path in (None, str(cache)):
        with pytest.raises(UserError, match=f"dualmcmc data fetch {name}"):
            load(source=name, path=path)


def test_incomplete_dataset_is_noted(cache):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1))
    cfg = Data(source="mnist", size=28, channels=1)
    assert data.load(cfg).notes == ("mnist: 6 of 60,000 train images found", "mnist: 3 of 10,000 test images found")
    (cache / "mnist" / "t10k-images-idx3-ubyte").unlink()
    assert "mnist: no test split found" in data.load(cfg).notes


def test_is_complete():
    assert is_complete("celeba", {"train": range(202_599)})
    assert not is_complete("celeba", {"train": range(162_770)})
    assert is_complete("svhn", {"train": range(73_257), "test": range(26_032)})


def test_official_files_add_splits_to_a_packed_file(cache):
    folder = cache / "svhn"
    folder.mkdir()
    train, test, extra = pixels(5), pixels(3, seed=1), pixels(4, seed=2)
    packed = {"train": channels_first(train), "test": channels_first(test)}
    pack.write(folder / "svhn.pack", packed, (3, 32, 32), {"crop": None, "name": "svhn"})
    savemat(folder / "extra_32x32.mat", {"X": extra.transpose(1, 2, 3, 0)})
    assert_equal(load(source="svhn"), (train, test))
    assert_equal(load(source="svhn", split="train+extra"), (np.concatenate([train, extra]), test))
    assert isinstance(data.load(Data(source="svhn")).train, pack.PackedStore)  # not read into memory


def test_fetched_dataset_can_be_moved(fetched_cifar10, tmp_path):
    shutil.move(fetched_cifar10.parent, tmp_path / "moved")
    for path in (tmp_path / "moved", tmp_path / "moved" / "cifar10.pack"):
        assert np.array_equal(load(source="cifar10", path=str(path))[0], pixels(5))


def test_packed_file_of_another_dataset_is_refused(tmp_path):
    images = channels_first(pixels(5))
    pack.write(tmp_path / "a.pack", {"train": images}, (3, 32, 32), {"crop": None, "name": "photos"})
    with pytest.raises(UserError, match="contains 'photos', not cifar10"):
        load(source="cifar10", path=str(tmp_path / "a.pack"))
    assert len(load(source="folder", path=str(tmp_path / "a.pack"))[0]) == 5


def test_fetched_file_is_preferred(cache):
    folder = cache / "cifar10"
    folder.mkdir()
    fetched, other = channels_first(pixels(6)), channels_first(pixels(2, seed=9))
    info = {"name": "cifar10", "crop": "center", "resize": "lanczos"}
    pack.write(folder / "cifar10-32-center-lanczos.pack", {"train": other, "test": other}, (3, 32, 32), info)
    splits = {"train": fetched, "test": other}
    pack.write(folder / "cifar10.pack", splits, (3, 32, 32), {"name": "cifar10", "crop": None})
    assert len(data.load(Data(source="cifar10")).train) == 6


def test_damaged_packed_file_is_refused(fetched_cifar10):
    content = bytearray(fetched_cifar10.read_bytes())
    content[-1] ^= 1
    fetched_cifar10.write_bytes(bytes(content))
    with pytest.raises(UserError, match="is damaged: fetch the dataset or pack"):
        load(source="cifar10")


def test_other_size_is_converted_or_packed(fetched_cifar10):
    assert isinstance(data.load(Data(source="cifar10", size=64)).train, MemoryStore)
    converted = fetched_cifar10.parent / pack_filename("cifar10", ImageSpec(64, 3))
    pack_sources(open_sources("cifar10", None), converted, ImageSpec(64, 3), {"name": "cifar10"})
    assert data.load(Data(source="cifar10", size=64)).train.path == converted


def test_celeba_crop_is_refused_for_arrays_and_packed_files(tmp_path):
    np.savez(tmp_path / "a.npz", pixels(3, 64))
    images = channels_first(pixels(3, 64))
    pack.write(tmp_path / "a.pack", {"train": images}, (3, 64, 64), {"crop": None, "name": "x"})
    for name in ("a.npz", "a.pack"):
        with pytest.raises(UserError, match="celeba140 is for CelebA"):
            load(source="folder", path=str(tmp_path / name), size=64, crop="celeba140")


# Datasets that are downloaded manually are packed when they are first used.


def test_celeba_is_packed_once(cache):
    folder = makers.celeba(cache / "celeba", 6, partition=False)
    settings = Data(source="celeba", size=64, crop="celeba140")
    assert len(data.load(settings).train) == 6
    packed = folder / "celeba-64-celeba140-lanczos.pack"
    written = packed.stat().st_mtime_ns
    assert len(data.load(settings).train) == 6
    assert packed.stat().st_mtime_ns == written
    makers.image_folder(folder / "img_align_celeba", pixels(8, (218, 178)), "jpg")
    assert len(data.load(settings).train) == 8
    for file in (folder / "img_align_celeba").iterdir():
        file.unlink()
    assert len(data.load(settings).train) == 8  # the packed file is enough


def test_packed_dataset_can_be_checked_without_its_files(cache):
    makers.celeba(cache / "celeba")
    data.load(Data(source="celeba", size=64, crop="celeba140"))
    shutil.rmtree(cache / "celeba" / "img_align_celeba")
    reports = check("celeba")
    assert [report.images for report in reports] == [5, 3, 2]
    assert {report.pixels for report in reports} == {"as packed"}


def test_greyscale_and_rgb_are_packed_separately(cache):
    makers.celeba(cache / "celeba")
    for channels in (3, 1, 3):
        images = data.load(Data(source="celeba", size=64, channels=channels))
        assert images.train.shape[1] == channels
    assert len(list((cache / "celeba").glob("*.pack"))) == 2


def test_dataset_with_unreadable_files_is_packed_once(cache):
    folder = makers.celeba(cache / "celeba")
    (folder / "img_align_celeba" / "000001.jpg").write_bytes(b"")
    cfg = Data(source="celeba", size=64, skip_bad=True)
    assert "000001.jpg" in data.load(cfg).notes[0]
    written = next(folder.glob("*.pack")).stat().st_mtime_ns
    assert len(data.load(cfg).train) == 4
    assert next(folder.glob("*.pack")).stat().st_mtime_ns == written


def test_unreadable_files_are_refused_unless_skipped(cache):
    folder = makers.celeba(cache / "celeba")
    (folder / "img_align_celeba" / "000001.jpg").write_bytes(b"")
    for skip_bad in (False, True, False, True):
        cfg = Data(source="celeba", size=64, skip_bad=skip_bad)
        if skip_bad:
            assert any("skipped" in note and "000001.jpg" in note for note in data.load(cfg).notes)
        else:
            with pytest.raises(UserError, match=r"000001\.jpg"):
                data.load(cfg)


def test_changed_files_are_packed_again(cache):
    folder = makers.celeba(cache / "celeba", 6)
    cfg = Data(source="celeba", size=64)
    before = data.load(cfg).train.checksum
    makers.image_folder(folder / "img_align_celeba", pixels(6, (218, 178), seed=3), "jpg")
    assert data.load(cfg).train.checksum != before
    (folder / "list_eval_partition.txt").write_text("".join(f"{i:06d}.jpg {i // 3}\n" for i in range(6)))
    assert (len(data.load(cfg).train), data.load(cfg).test) == (3, None)


def test_stray_image_does_not_replace_a_packed_dataset(cache):
    for name, make in (
        ("celeba", lambda f: makers.celeba(f, 6) / "img_align_celeba"),
        ("celebahq256", lambda f: makers.image_folder(f / "images", pixels(6, 64))),
    ):
        images = make(cache / name)
        cfg = Data(source=name, size=64)
        count = len(data.load(cfg).train)
        shutil.rmtree(images)
        (cache / name / "sheet.png").write_bytes(makers.encoded(pixels(1, 80)[0]))
        assert len(data.load(cfg).train) == count > 1


def test_read_only_cache_is_not_written(cache, monkeypatch):
    makers.celeba(cache / "celeba")
    monkeypatch.setattr("dualmcmc.data.resolve.os.access", lambda path, mode: False)
    assert len(data.load(Data(source="celeba", size=64)).train) == 5
    assert not list((cache / "celeba").glob("*.pack"))
