"""Every named set in its official layout, from small generated files."""

import shutil
import tarfile

import numpy as np
import pytest

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data import bundle, pack
from dualmcmc.data.check import check
from dualmcmc.data.images import Fit, fit_pixels
from dualmcmc.data.opening import is_complete, open_sources, pack_sources, packed_name
from dualmcmc.data.sets import SETS, published
from dualmcmc.data.store import Memory
from dualmcmc.errors import UserError
from tests.data import makers
from tests.data.makers import pixels


def load(**settings):
    images = data.load(Data(**settings))
    return tuple(None if store is None else store.tensor().permute(0, 2, 3, 1).numpy() for store in images[:2])


def same(images, wanted):
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(images, wanted, strict=True))


def test_digits_are_the_real_ones():
    from sklearn.datasets import load_digits

    images, _ = load(source="digits", size=8, channels=1)
    assert images.shape == (1797, 8, 8, 1)
    assert (images.min(), images.max()) == (0, 255)
    assert np.abs(images[..., 0] * (16 / 255) - load_digits().images).max() < 0.04


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_an_idx_pair(cache, tmp_path, name):
    splits = pixels(6, 28, 1), pixels(3, 28, 1, seed=1)
    makers.mnist(cache / name, *splits)
    same(load(source=name, size=28, channels=1), splits)
    same(load(source=name, size=28, channels=1, path=str(cache / name)), splits)
    bigger, _ = load(source=name, size=32, channels=3)
    assert np.array_equal(bigger[0], fit_pixels(splits[0][0], Fit(32, 3)))


def test_a_cifar10_folder_and_its_archive(cache, tmp_path):
    splits = pixels(11), pixels(4, seed=1)
    makers.cifar10(cache / "cifar10", *splits)
    same(load(source="cifar10"), splits)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(cache / "cifar10" / "cifar-10-batches-py", "cifar-10-batches-py")
    same(load(source="cifar10", path=str(tmp_path / "cifar-10-python.tar.gz")), splits)
    same(load(source="cifar10", path=str(tmp_path)), splits)  # the folder it lies in


def test_cifar10_as_tall_pictures(cache):
    splits = pixels(10), pixels(4, seed=1)
    folder = cache / "cifar10"
    folder.mkdir()
    for number, part in enumerate(np.array_split(splits[0], 5), 1):
        (folder / f"data_batch_{number}.png").write_bytes(makers.encoded(part.reshape(-1, 1024, 3)))
    (folder / "test_batch.png").write_bytes(makers.encoded(splits[1].reshape(-1, 1024, 3)))
    same(load(source="cifar10"), splits)
    (folder / "test_batch.png").write_bytes(makers.encoded(pixels(1, 16)[0]))
    with pytest.raises(UserError, match="1024 wide"):
        load(source="cifar10")


def test_a_cifar10_folder_with_a_batch_missing(cache):
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
    same(load(source="cifar100"), splits)


def test_svhn(cache):
    from scipy.io import savemat

    splits = {"train": pixels(5), "test": pixels(3, seed=1), "extra": pixels(4, seed=2)}
    folder = cache / "svhn"
    folder.mkdir()
    for name, images in splits.items():
        savemat(folder / f"{name}_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.ones((len(images), 1))})
    same(load(source="svhn"), (splits["train"], splits["test"]))
    both, test = load(source="svhn", split="train+extra")
    assert np.array_equal(both, np.concatenate([splits["train"], splits["extra"]]))
    assert np.array_equal(test, splits["test"])
    only, nothing = load(source="svhn", split="test")
    assert np.array_equal(only, splits["test"])
    assert nothing is None
    savemat(folder / "train_32x32.mat", {"y": np.ones(3)})
    with pytest.raises(UserError, match="called X"):
        load(source="svhn")
    (folder / "train_32x32.mat").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"train_32x32\.mat"):
        load(source="svhn")


def test_celeba_with_its_partition_and_an_explicit_crop(cache):
    makers.celeba(cache / "celeba")
    settings = {"source": "celeba", "size": 64, "crop": "celeba140"}
    images = data.load(Data(**settings))
    assert (len(images.train), len(images.test)) == (5, 2)
    from PIL import Image

    photo = np.asarray(Image.open(cache / "celeba" / "img_align_celeba" / "000000.jpg"))
    wanted = fit_pixels(photo, Fit(64, 3, "celeba140"))
    assert np.array_equal(images.train.take([0])[0].permute(1, 2, 0).numpy(), wanted)
    other = data.load(Data(**{**settings, "crop": "celeba108"}))
    assert other.train.checksum != images.train.checksum
    assert data.describe(Data(**settings), images)["crop"] == "celeba140"
    assert len(data.load(Data(**settings, split="train+valid+test")).train) == 10


def test_celeba_is_packed_once_and_again_when_more_is_there(cache):
    folder = makers.celeba(cache / "celeba", 6, partition=False)
    settings = Data(source="celeba", size=64, crop="celeba140")
    assert len(data.load(settings).train) == 6
    made = folder / "celeba-64-celeba140-lanczos.pack"
    written = made.stat().st_mtime_ns
    assert len(data.load(settings).train) == 6
    assert made.stat().st_mtime_ns == written
    makers.image_folder(folder / "img_align_celeba", pixels(8, (218, 178)), "jpg")
    assert len(data.load(settings).train) == 8
    for file in (folder / "img_align_celeba").iterdir():
        file.unlink()
    assert len(data.load(settings).train) == 8  # the packed file is enough


def test_a_zip_of_celeba_without_a_partition(tmp_path):
    path = makers.image_zip(tmp_path / "img_align_celeba.zip", pixels(4, (109, 89)), "img_align_celeba")
    images, test = load(source="celeba", size=64, crop="celeba140", path=str(path))
    assert images.shape == (4, 64, 64, 3)
    assert test is None
    assert sorted(item.name for item in tmp_path.iterdir()) == ["img_align_celeba.zip"]  # nothing beside it


@pytest.mark.parametrize(
    ("line", "words"), [("000000.jpg 3", "line 3"), ("000000.jpg", "line 3"), ("other.jpg 0", "belong together")]
)
def test_a_bad_partition_file(tmp_path, line, words):
    makers.celeba(tmp_path, 4)
    file = tmp_path / "list_eval_partition.txt"
    kept = file.read_text().splitlines()[:2]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(UserError, match=words):
        load(source="celeba", size=64, path=str(tmp_path))


def test_celeba_that_was_cropped_already(tmp_path):
    makers.image_folder(tmp_path / "img_align_celeba", pixels(2, 64), "jpg")
    with pytest.raises(UserError, match="64x64"):
        load(source="celeba", size=64, crop="celeba140", path=str(tmp_path))


def test_celebahq_as_a_folder_or_a_zip(cache):
    images = pixels(3, 64)
    makers.image_folder(cache / "celebahq256" / "celeba_hq_256", images)
    got, test = load(source="celebahq256", size=64)
    assert np.array_equal(got, images)
    assert test is None
    zipped = cache / "celebahq256" / "zipped"
    zipped.mkdir()
    makers.image_zip(zipped / "any.zip", images)
    assert np.array_equal(load(source="celebahq256", size=64, path=str(zipped))[0], images)


def test_the_official_lmdb_of_lsun(cache):
    folder = cache / "lsun-church"
    folder.mkdir()
    train, test = pixels(6, (32, 40)), pixels(2, (40, 32), seed=1)
    makers.lmdb_of(folder / "church_outdoor_train_lmdb", train)
    makers.lmdb_of(folder / "church_outdoor_val_lmdb", test)
    same(load(source="lsun-church"), (train[:, :, 4:36], test[:, 4:36]))
    same(load(source="lsun-church", path=str(folder / "church_outdoor_train_lmdb"))[:1], (train[:, :, 4:36],))


def test_an_lsun_zip_must_be_unpacked(cache):
    (cache / "lsun-church").mkdir()
    (cache / "lsun-church" / "church_outdoor_train_lmdb.zip").write_bytes(b"a zip")
    with pytest.raises(UserError, match="unpacked first"):
        load(source="lsun-church")


@pytest.mark.parametrize("name", [name for name in SETS if name != "digits"])
def test_a_set_that_is_not_here_says_how_to_get_it(cache, name):
    for path in (None, str(cache)):
        with pytest.raises(UserError, match=f"dualmcmc data fetch {name}"):
            load(source=name, path=path)


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01" + b"\0" * 20, makers.idx(pixels(2, 28, 1))[:-1], b"\0" * 16])
def test_bad_idx_files(tmp_path, content):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError, match="train-images"):
        load(source="mnist", size=28, channels=1, path=str(tmp_path))


def test_damaged_archives_of_official_files(tmp_path):
    makers.mnist(tmp_path, pixels(6, 28, 1), pixels(3, 28, 1))
    gz = tmp_path / "train-images-idx3-ubyte.gz"
    whole = gz.read_bytes()
    for content in (whole[:-40], b"nonsense"):
        gz.write_bytes(content)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz"):
            load(source="mnist", size=28, channels=1, path=str(tmp_path))
    for name in ("a.tar.gz", "a.zip"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            bundle.Bundle(tmp_path / name).names()


def test_a_split_beside_the_packed_file_counts_too(cache):
    from scipy.io import savemat

    folder = cache / "svhn"
    folder.mkdir()
    train, test, extra = pixels(5), pixels(3, seed=1), pixels(4, seed=2)
    packed = {"train": train.transpose(0, 3, 1, 2), "test": test.transpose(0, 3, 1, 2)}
    pack.write(folder / "svhn.pack", packed, (3, 32, 32), {"crop": None, "name": "svhn"})
    savemat(folder / "extra_32x32.mat", {"X": extra.transpose(1, 2, 3, 0)})
    same(load(source="svhn"), (train, test))
    same(load(source="svhn", split="train+extra"), (np.concatenate([train, extra]), test))
    assert isinstance(data.load(Data(source="svhn")).train, pack.Packed)  # not read where it is not needed


def test_a_folder_with_a_fetched_set_can_be_moved(cache, tmp_path):
    images = pixels(5)
    (tmp_path / "moved").mkdir()
    pack.write(
        tmp_path / "moved" / "cifar10.pack",
        {"train": images.transpose(0, 3, 1, 2)},
        (3, 32, 32),
        {"crop": None, "name": "cifar10"},
    )
    for path in (tmp_path / "moved", tmp_path / "moved" / "cifar10.pack"):
        assert np.array_equal(load(source="cifar10", path=str(path))[0], images)


def test_a_packed_set_can_be_checked_when_its_files_are_gone(cache):
    makers.celeba(cache / "celeba")
    data.load(Data(source="celeba", size=64, crop="celeba140"))
    shutil.rmtree(cache / "celeba" / "img_align_celeba")
    reports = check("celeba")
    assert [report.images for report in reports] == [5, 3, 2]
    assert {report.pixels for report in reports} == {"as packed"}


def test_a_packed_file_of_another_set_is_refused(cache, tmp_path):
    images = pixels(5).transpose(0, 3, 1, 2)
    pack.write(tmp_path / "a.pack", {"train": images}, (3, 32, 32), {"crop": None, "name": "photos"})
    with pytest.raises(UserError, match="packed from 'photos', not from cifar10"):
        load(source="cifar10", path=str(tmp_path / "a.pack"))
    assert len(load(source="folder", path=str(tmp_path / "a.pack"))[0]) == 5


def test_a_set_that_is_here_in_part_says_so(cache):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1))
    cfg = Data(source="mnist", size=28, channels=1)
    notes = data.load(cfg).notes
    assert notes == ("mnist: 6 of 60,000 train images are here", "mnist: 3 of 10,000 test images are here")
    (cache / "mnist" / "t10k-images-idx3-ubyte").unlink()
    assert "mnist: its test split is not here" in data.load(cfg).notes


def test_the_fetched_set_counts_before_one_packed_by_hand(cache):
    folder = cache / "cifar10"
    folder.mkdir()
    real, other = pixels(6).transpose(0, 3, 1, 2), pixels(2, seed=9).transpose(0, 3, 1, 2)
    note = {"name": "cifar10", "crop": "center", "resize": "lanczos"}
    pack.write(folder / "cifar10-32-center-lanczos.pack", {"train": other, "test": other}, (3, 32, 32), note)
    pack.write(folder / "cifar10.pack", {"train": real, "test": other}, (3, 32, 32), {"name": "cifar10", "crop": None})
    assert len(data.load(Data(source="cifar10")).train) == 6


def test_grey_and_colour_are_packed_apart(cache):
    makers.celeba(cache / "celeba")
    for channels in (3, 1, 3):
        images = data.load(Data(source="celeba", size=64, channels=channels))
        assert images.train.shape[1] == channels
    assert len(list((cache / "celeba").glob("*.pack"))) == 2


def test_a_set_with_bad_files_is_packed_once(cache):
    folder = makers.celeba(cache / "celeba")
    (folder / "img_align_celeba" / "000001.jpg").write_bytes(b"")
    cfg = Data(source="celeba", size=64, skip_bad=True)
    assert "000001.jpg" in data.load(cfg).notes[0]
    written = next(folder.glob("*.pack")).stat().st_mtime_ns
    assert len(data.load(cfg).train) == 4
    assert next(folder.glob("*.pack")).stat().st_mtime_ns == written


def test_what_was_left_out_is_refused_again_unless_it_may_be_left_out(cache):
    folder = makers.celeba(cache / "celeba")
    (folder / "img_align_celeba" / "000001.jpg").write_bytes(b"")
    for skip_bad in (False, True, False, True):
        cfg = Data(source="celeba", size=64, skip_bad=skip_bad)
        if skip_bad:
            assert any("left out" in note and "000001.jpg" in note for note in data.load(cfg).notes)
        else:
            with pytest.raises(UserError, match=r"000001\.jpg"):
                data.load(cfg)


def test_files_that_changed_are_packed_again(cache):
    folder = makers.celeba(cache / "celeba", 6)
    cfg = Data(source="celeba", size=64)
    before = data.load(cfg).train.checksum
    makers.image_folder(folder / "img_align_celeba", pixels(6, (218, 178), seed=3), "jpg")
    assert data.load(cfg).train.checksum != before
    (folder / "list_eval_partition.txt").write_text("".join(f"{i:06d}.jpg {i // 3}\n" for i in range(6)))
    assert (len(data.load(cfg).train), data.load(cfg).test) == (3, None)


def test_a_stray_picture_does_not_replace_a_packed_set(cache):
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


def test_all_of_celeba_without_its_partition_is_complete():
    assert published("celeba", ["train"]) == {"train": 202_599}
    assert published("celeba", ["train", "valid", "test"])["train"] == 162_770
    assert published("folder", ["train"]) == {}
    whole = {"train": range(202_599)}
    assert is_complete("celeba", whole)
    assert not is_complete("celeba", {"train": range(162_770)})
    assert is_complete("svhn", {"train": range(73_257), "test": range(26_032)})


def test_a_damaged_packed_set_is_not_trained_on(cache):
    path = cache / "cifar10" / "cifar10.pack"
    path.parent.mkdir()
    images = pixels(5).transpose(0, 3, 1, 2)
    pack.write(path, {"train": images, "test": images}, (3, 32, 32), {"crop": None, "name": "cifar10"})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="is damaged"):
        load(source="cifar10")


def test_another_size_can_be_packed_once_and_for_all(cache):
    path = cache / "cifar10" / "cifar10.pack"
    path.parent.mkdir()
    images = pixels(5).transpose(0, 3, 1, 2)
    pack.write(path, {"train": images, "test": images}, (3, 32, 32), {"crop": None, "name": "cifar10"})
    assert isinstance(data.load(Data(source="cifar10", size=64)).train, Memory)
    made = path.parent / packed_name("cifar10", Fit(64, 3))
    pack_sources(open_sources("cifar10", None), made, Fit(64, 3), {"name": "cifar10"})
    assert data.load(Data(source="cifar10", size=64)).train.path == made


def test_a_crop_that_cannot_be_is_refused_for_arrays_and_packs_too(cache, tmp_path):
    np.savez(tmp_path / "a.npz", pixels(3, 64))
    pack.write(
        tmp_path / "a.pack", {"train": pixels(3, 64).transpose(0, 3, 1, 2)}, (3, 64, 64), {"crop": None, "name": "x"}
    )
    for name in ("a.npz", "a.pack"):
        with pytest.raises(UserError, match="celeba140 is for CelebA"):
            load(source="folder", path=str(tmp_path / name), size=64, crop="celeba140")


def test_a_read_only_cache_is_enough(cache, monkeypatch):
    makers.celeba(cache / "celeba")
    monkeypatch.setattr("dualmcmc.data.opening.os.access", lambda path, mode: False)
    assert len(data.load(Data(source="celeba", size=64)).train) == 5
    assert not list((cache / "celeba").glob("*.pack"))


def test_the_validation_lmdb_alone_is_a_test_split(cache, tmp_path):
    makers.lmdb_of(tmp_path / "church_outdoor_val_lmdb", pixels(2))
    makers.lmdb_of(tmp_path / "interval", pixels(3))
    for name, split in (("church_outdoor_val_lmdb", "test"), ("interval", "train")):
        images, _ = load(source="lsun-church", path=str(tmp_path / name), split=split)
        assert len(images) in (2, 3)


def test_a_damaged_zip_of_official_files(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("train-images-idx3-ubyte", makers.idx(pixels(2, 28, 1)))
    content = bytearray((tmp_path / "a.zip").read_bytes())
    content[200] ^= 255
    (tmp_path / "a.zip").write_bytes(bytes(content))
    with pytest.raises(UserError, match="Bad CRC"):
        load(source="mnist", size=28, channels=1, path=str(tmp_path / "a.zip"))
