import numpy as np
import pytest

from dualmcmc.data import open_images
from dualmcmc.data.images import ImageSpec
from dualmcmc.utils.errors import UserError
from tests.data.formats.common import IMAGES, image_tar, read
from tests.data.makers import image_folder


def test_unreadable_images_are_listed_or_skipped(tmp_path):
    folder = image_folder(tmp_path / "a", IMAGES)
    (folder / "000002.png").write_bytes(b"")
    (folder / "000005.png").write_bytes(b"junk")
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert "2 images cannot be used" in message
    assert "000002.png' (the file is empty)" in message
    assert "000005.png" in message
    assert "skip_bad" in message
    assert np.array_equal(read(folder, skip_bad=True), IMAGES[[0, 1, 3, 4, 6]])


def test_shared_reason_appears_once(tmp_path):
    folder = image_folder(tmp_path / "a", IMAGES)
    with pytest.raises(UserError) as error:
        open_images(folder, ImageSpec(16, 3, "celeba140"))
    assert str(error.value).count("celeba140 is for CelebA") == 1
    assert "7 images cannot be used" in str(error.value)
    assert "and 2 more" in str(error.value)


def test_skipping_all_images_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match="No image is left"):
        read(tmp_path, skip_bad=True)


def test_images_larger_than_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.source.available_memory", lambda: 2 * 5 * 16 * 16 * 3)
    monkeypatch.setattr("dualmcmc.data.source.INITIAL_CAPACITY", 2)
    for path in (image_folder(tmp_path / "a", IMAGES), image_tar(tmp_path / "a.tar", "")):
        with pytest.raises(UserError, match="dualmcmc data pack") as error:
            read(path)
        assert "--size 16" in str(error.value)


def test_unknown_number_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr("dualmcmc.data.source.INITIAL_CAPACITY", 2)
    assert np.array_equal(read(image_tar(tmp_path / "a.tar", "")), IMAGES)
