import numpy as np
import pytest

from dualmcmc.data import pack
from dualmcmc.data.check import COLUMNS, SHOWN, check, missing
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import open_sources, pack_sources
from dualmcmc.errors import UserError
from tests.data import makers
from tests.data.makers import pixels


def test_counts_means_sizes_and_duplicates(tmp_path):
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
    assert "bad.png: the file is empty" in report.bad[0]
    assert not report.is_sound()
    assert report.as_dict()["sound"] is False


def test_what_is_left_out_is_not_a_fault_but_all_else_is(tmp_path, cache):
    folder = makers.image_folder(tmp_path / "a", pixels(4, 16))
    (folder / "bad.png").write_bytes(b"")
    (report,) = check("folder", folder)
    assert report.is_sound(skip_bad=True)
    assert not report.is_sound()
    makers.celeba(cache / "celeba", 6)
    (cache / "celeba" / "img_align_celeba" / "000000.jpg").write_bytes(b"")
    reports = check("celeba")
    assert not any(report.is_sound(skip_bad=True) for report in reports)  # far from complete
    assert missing("celeba", reports) == []
    assert missing("celeba", reports[1:]) == ["train"]
    assert missing("folder", []) == []


def test_a_place_without_images_is_refused(tmp_path):
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(__file__, "readme.txt")
    with pytest.raises(UserError, match="holds no images"):
        check("folder", tmp_path / "a.tar")


def test_few_thumbnails_are_held_at_a_time(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", pixels(9 * SHOWN, 8))
    held = []
    monkeypatch.setattr("dualmcmc.data.check._sheet", lambda shown: held.append(len(shown)) or pixels(1))
    check("folder", tmp_path / "a.npz")
    assert SHOWN / 2 < held[0] <= SHOWN


def test_grey_sets_have_one_channel(tmp_path):
    images = pixels(5, 16, 1)
    (report,) = check("folder", makers.image_folder(tmp_path / "a", images))
    assert report.channels == len(report.mean) == 1
    assert report.mean[0] == pytest.approx(images.mean() / 255)
    assert report.is_sound()
    assert report.pixels == "without a published checksum"


def test_a_duplicate_across_splits_counts(cache):
    train = pixels(6, 28, 1)
    makers.mnist(cache / "mnist", train, train[:2])
    first, second = check("mnist")
    assert (first.duplicates, second.duplicates) == (0, 2)
    assert first.published == 60_000
    assert first.pixels == "not as published"
    assert not first.is_sound()


def test_the_real_digits_are_as_published():
    (report,) = check("digits")
    assert (report.images, report.pixels, report.is_sound()) == (1797, "as published", True)


def test_a_packed_file_that_changed_is_found_out(tmp_path):
    folder, path = makers.image_folder(tmp_path / "a", pixels(6, 16)), tmp_path / "a.pack"
    pack_sources(open_sources("folder", folder), path, Fit(16, 3), {})
    (report,) = check("folder", path)
    assert (report.pixels, report.is_sound()) == ("as packed", True)
    content = bytearray(path.read_bytes())
    content[pack.HEADER + 100] ^= 1
    path.write_bytes(bytes(content))
    (report,) = check("folder", path)
    assert (report.pixels, report.is_sound()) == ("not as packed", False)


@pytest.mark.parametrize("count", [1, 5, COLUMNS + 3, SHOWN + 1, 3 * SHOWN])
def test_the_contact_sheet_shows_images_from_all_over_the_set(tmp_path, count):
    shades = np.linspace(0, 255, count).astype(np.uint8)[:, None, None, None]
    np.savez(tmp_path / "a.npz", np.broadcast_to(shades, (count, 32, 32, 3)))
    (report,) = check("folder", tmp_path / "a.npz")
    inside = report.sheet[0, 8::66, 8::66].flatten()  # a point in each image of 64 pixels and its gap of 2
    assert len(inside[inside < 255]) <= SHOWN
    assert inside.min() == 0
    assert count == 1 or inside[inside < 255].max() >= (200 if count > 5 else 190)


def test_images_of_many_sizes_on_one_sheet(tmp_path):
    for index, size in enumerate([(8, 8), (300, 200), (28, 28), (64, 64)]):
        (tmp_path / f"{index}.png").write_bytes(makers.encoded(pixels(1, size)[0]))
    (report,) = check("folder", tmp_path)
    assert report.sheet.shape[0] == 3
    assert report.sheet.shape[1] == 64
