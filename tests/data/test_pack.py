import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dualmcmc.data import pack
from dualmcmc.utils.errors import UserError
from tests.data.makers import pixels

IMAGES = pixels(20, 8).transpose(0, 3, 1, 2).copy()


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "a.pack"
    pack.write(path, {"train": IMAGES[:15], "test": IMAGES[15:]}, (3, 8, 8), {"crop": "center", "name": "x"})
    return path


def test_short_reads(packed, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(pack.os, "preadv", lambda handle, views, at: real(handle, [views[0][:7]], at))
    store = pack.read(packed)[0]["train"]
    assert np.array_equal(store.take([3, 14]).numpy(), IMAGES[[3, 14]])
    assert store.is_intact()


def test_changed_pixel_is_detected(packed):
    content = bytearray(packed.read_bytes())
    content[-1] ^= 1
    packed.write_bytes(bytes(content))
    splits, _ = pack.read(packed)
    assert [splits[name].is_intact() for name in ("train", "test")] == [True, False]


def test_stale_temporary_files_are_removed(tmp_path):
    leftover, busy = tmp_path / ".a.pack.999999999.tmp", tmp_path / f".a.pack.{os.getpid()}.tmp"
    for file in (leftover, busy, tmp_path / ".b.pack.999999999.tmp", tmp_path / ".b.npz.999999999.tmp"):
        file.write_bytes(b"half")
        os.utime(file, (0, 0))
    pack.write(tmp_path / "a.pack", {"train": IMAGES}, (3, 8, 8), {})
    assert not leftover.exists()
    assert not (tmp_path / ".b.pack.999999999.tmp").exists()
    assert (tmp_path / ".b.npz.999999999.tmp").exists()  # not a packed file


def test_packed_file_is_a_safetensors_file(packed):
    with safe_open(packed, "pt") as file:
        assert torch.equal(file.get_tensor("test"), torch.from_numpy(IMAGES[15:]))
        assert file.metadata()["format"] == pack.FORMAT


def test_info_is_stored(packed):
    _, info = pack.read(packed)
    assert (info["crop"], info["name"], info["splits"]["test"]["images"]) == ("center", "x", 5)


def test_failed_write_leaves_no_file(tmp_path):
    def failing():
        yield from IMAGES[:3]
        raise UserError("bad image")

    with pytest.raises(UserError, match="bad image"):
        pack.write(tmp_path / "a.pack", {"train": failing()}, (3, 8, 8), {})
    with pytest.raises(UserError, match="nothing to pack"):
        pack.write(tmp_path / "a.pack", {"train": iter([])}, (3, 8, 8), {})
    assert list(tmp_path.iterdir()) == []


def test_image_of_another_shape_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="expected uint8 images of shape"):
        pack.write(tmp_path / "a.pack", {"train": [IMAGES[0], IMAGES[0][:, :4]]}, (3, 8, 8), {})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: b"", "not a packed file"),
        (lambda c: c[:100], "damaged|not a packed file"),
        (lambda c: c[:-1], "truncated"),
        (lambda c: b"\xff" * 8 + c[8:], "not a packed file"),
        (lambda c: c.replace(b'"version": "1"', b'"version": "9"'), "newer dualmcmc"),
        (lambda c: c.replace(b'"version": "1"', b'"version": "x"'), "damaged"),
        (lambda c: c.replace(b'"dtype": "U8"', b'"dtype": "F4"'), "damaged"),
        (lambda c: c.replace(b"[15, 3, 8, 8]", b"[16, 3, 8, 8]"), "damaged"),
        (lambda c: c.replace(b"[15, 3, 8, 8]", b"[-5, 3, 8, 8]"), "damaged"),
        (lambda c: c.replace(b"data_offsets", b"data_offsetz"), "damaged"),
        (lambda c: c.replace(b"sha256", b"sha255"), "damaged"),
    ],
)
def test_damaged_files_are_refused(packed, damage, message):
    content = packed.read_bytes()
    changed = damage(content)
    assert changed != content
    packed.write_bytes(changed)
    with pytest.raises(UserError, match=message) as error:
        pack.read(packed)
    assert "\n" not in str(error.value)


def test_file_truncated_while_it_is_read(packed):
    store = pack.read(packed)[0]["train"]
    with open(packed, "r+b") as file:
        file.truncate(pack.HEADER + 100)
    with pytest.raises(UserError, match="truncated"):
        store.take([14])


def test_old_name_of_skipped_images(tmp_path):
    path = tmp_path / "a.pack"
    pack.write(path, {"train": IMAGES}, (3, 8, 8), {"left_out": {"train": "1 image cannot be used"}})
    assert pack.read(path)[1]["skipped"] == {"train": "1 image cannot be used"}
