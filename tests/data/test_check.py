import tarfile

import numpy as np
import pytest

from dualmcmc.data import pack
from dualmcmc.data.check import COLUMNS, MAX_THUMBNAILS, check, missing_splits
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import open_sources, pack_sources
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.makers import pixels


def test_statistics(tmp_path):
    images = pixels(6, 16)
    images[4] = images[1]
    folder = makers.image_folder(tmp_path / "a", images)
    (folder / "zz.png").write_bytes(makers.encoded(pixels(1, (10, 20), seed=3)[0]))
    (folder / "bad.png").write_bytes(b"")
    (report,) = check("folder", folder)
    everything = np.concatenate([images.reshape(-1, 3), pixels(1, (10, 20), seed=3).reshape(-1, 3)]) / 255
    assert report.images == 7
    assert report.sizes == {"16x16": 6, "20x10": 1}
    assert report.mean == pytest.approx(everything.mean(0).tolist(), abs=1e-9)
    assert report.std == pytest.approx(everything.std(0).tolist(), abs=1e-9)
    assert report.duplicates == 1
    assert "000004.png" in report.duplicate_pairs[0]
    assert "000001.png" in report.duplicate_pairs[0]
    assert "bad.png: the file is empty" in report.unreadable[0]
    assert not report.is_valid()
    assert report.as_dict()["valid"] is False


def test_skipped_files_are_accepted(tmp_path, cache):
    folder = makers.image_folder(tmp_path / "a", pixels(4, 16))
    (folder / "bad.png").write_bytes(b"")
    (report,) = check("folder", folder)
    assert report.is_valid(skip_bad=True)
    assert not report.is_valid()
    makers.celeba(cache / "celeba", 6)
    (cache / "celeba" / "img_align_celeba" / "000000.jpg").write_bytes(b"")
    reports = check("celeba")
    assert not any(report.is_valid(skip_bad=True) for report in reports)  # far from complete
    assert missing_splits("celeba", reports) == []
    assert missing_splits("celeba", reports[1:]) == ["train"]
    assert missing_splits("folder", []) == []


def test_archive_without_images_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(__file__, "readme.txt")
    with pytest.raises(UserError, match="contains no images"):
        check("folder", tmp_path / "a.tar")


def test_number_of_thumbnails_is_bounded(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", pixels(9 * MAX_THUMBNAILS, 8))
    held = []
    monkeypatch.setattr("dualmcmc.data.check._contact_sheet", lambda shown: held.append(len(shown)) or pixels(1))
    check("folder", tmp_path / "a.npz")
    assert MAX_THUMBNAILS / 2 < held[0] <= MAX_THUMBNAILS


def test_greyscale_has_one_channel(tmp_path):
    images = pixels(5, 16, 1)
    (report,) = check("folder", makers.image_folder(tmp_path / "a", images))
    assert report.channels == len(report.mean) == 1
    assert report.mean[0] == pytest.approx(images.mean() / 255)
    assert report.is_valid()
    assert report.pixels == "without a published checksum"


def test_duplicates_across_splits(cache):
    train = pixels(6, 28, 1)
    makers.mnist(cache / "mnist", train, train[:2])
    first, second = check("mnist")
    assert (first.duplicates, second.duplicates) == (0, 2)
    assert first.expected == 60_000
    assert first.pixels == "not as published"
    assert not first.is_valid()


def test_digits_are_as_published():
    (report,) = check("digits")
    assert (report.images, report.pixels, report.is_valid()) == (1797, "as published", True)


def test_modified_packed_file(tmp_path):
    folder, path = makers.image_folder(tmp_path / "a", pixels(6, 16)), tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, ImageSpec(16, 3), {})
    (report,) = check("folder", path)
    assert (report.pixels, report.is_valid()) == ("as packed", True)
    content = bytearray(path.read_bytes())
    content[pack.HEADER + 100] ^= 1
    path.write_bytes(bytes(content))
    (report,) = check("folder", path)
    assert (report.pixels, report.is_valid()) == ("not as packed", False)


@pytest.mark.parametrize("count", [1, 5, COLUMNS + 3, MAX_THUMBNAILS + 1, 3 * MAX_THUMBNAILS])
def test_contact_sheet_covers_the_dataset(tmp_path, count):
    shades = np.linspace(0, 255, count).astype(np.uint8)[:, None, None, None]
    np.savez(tmp_path / "a.npz", np.broadcast_to(shades, (count, 32, 32, 3)))
    (report,) = check("folder", tmp_path / "a.npz")
    inside = report.sheet[0, 8::66, 8::66].flatten()  # one pixel per image: 64 pixels and a gap of 2
    assert len(inside[inside < 255]) <= MAX_THUMBNAILS
    assert inside.min() == 0
    assert count == 1 or inside[inside < 255].max() >= (200 if count > 5 else 190)


def test_contact_sheet_of_different_sizes(tmp_path):
    for index, size in enumerate([(8, 8), (300, 200), (28, 28), (64, 64)]):
        (tmp_path / f"{index}.png").write_bytes(makers.encoded(pixels(1, size)[0]))
    (report,) = check("folder", tmp_path)
    assert report.sheet.shape[0] == 3
    assert report.sheet.shape[1] == 64
