import os

import numpy as np
import pytest

from dualmcmc.data.formats import folder
from dualmcmc.utils.errors import UserError
from tests.data.formats.common import IMAGES, image_tar, read
from tests.data.makers import encoded, image_folder, image_zip


def test_single_image(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(IMAGES[0]))
    assert np.array_equal(read(tmp_path / "a.png"), IMAGES[:1])
    assert np.array_equal(read(tmp_path), IMAGES[:1])


def test_subfolders_are_sorted_by_name(tmp_path):
    for index, name in enumerate(["b/1.png", "a.PNG", "b/0.jpeg", "c.png"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(IMAGES[index]))
    (tmp_path / "._a.png").write_bytes(b"written by macOS")
    (tmp_path / "notes.txt").write_text("not an image")
    assert np.array_equal(read(tmp_path), IMAGES[[1, 2, 0, 3]])


def test_links_are_followed_once(tmp_path):
    outside = image_folder(tmp_path / "outside", IMAGES[:2])
    inside = image_folder(tmp_path / "in", IMAGES[2:4])
    (inside / "linked").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (outside / "back").symlink_to(inside)
    (inside / "self").symlink_to("self")
    assert np.array_equal(read(inside), IMAGES[[2, 3, 0, 1]])


def test_pipes_are_skipped(tmp_path):
    image_folder(tmp_path, IMAGES[:1])
    os.mkfifo(tmp_path / "pipe.png")
    assert len(read(tmp_path)) == 1


def test_files_too_large_for_an_image(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_BYTES", 100)
    for path in (
        image_folder(tmp_path / "a", IMAGES),
        image_zip(tmp_path / "a.zip", IMAGES),
        image_tar(tmp_path / "a.tar", ""),
    ):
        with pytest.raises(UserError, match="too many for an image"):
            read(path)
