import hashlib
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dualmcmc.data import pack
from dualmcmc.data.store import Joined, Memory, Subset
from dualmcmc.errors import UserError
from tests.data.makers import pixels

IMAGES = pixels(20, 8).transpose(0, 3, 1, 2).copy()


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "a.pack"
    pack.write(path, {"train": IMAGES[:15], "test": IMAGES[15:]}, (3, 8, 8), {"crop": "center", "name": "x"})
    return path


def test_every_store_gives_the_images_asked_for(packed):
    whole = Memory(torch.from_numpy(IMAGES))
    splits, _ = pack.read(packed)
    joined = Joined([splits["train"], splits["test"]])
    chosen = np.array([7, 0, 19, 7, 14, 15])
    for store in (
        whole,
        joined,
        Subset(whole, np.arange(20)),
        Joined([Subset(whole, np.arange(9)), Subset(joined, np.arange(9, 20))]),
    ):
        assert len(store) == 20
        assert store.nbytes == IMAGES.nbytes
        assert np.array_equal(store.take(chosen).numpy(), IMAGES[chosen])
        assert np.array_equal(store.tensor().numpy(), IMAGES)
        assert np.array_equal(store.first(3).numpy(), IMAGES[:3])
        assert np.array_equal(store.first(99).numpy(), IMAGES)
    backwards = Subset(joined, np.arange(20)[::-1])
    assert np.array_equal(backwards.take([0, 1]).numpy(), IMAGES[[19, 18]])


def test_checksums_are_of_the_pixels(packed):
    splits, _ = pack.read(packed)
    wanted = hashlib.sha256(IMAGES[:15].tobytes()).hexdigest()
    assert splits["train"].checksum == Memory(torch.from_numpy(IMAGES[:15])).checksum == wanted
    assert Subset(splits["train"], np.arange(3)).checksum != Subset(splits["train"], np.arange(3)[::-1]).checksum


def test_a_checksum_of_parts_knows_every_pixel_and_the_order(packed):
    whole = Memory(torch.from_numpy(IMAGES))
    changed = Memory(torch.from_numpy(IMAGES ^ 1))
    some = np.arange(3)
    assert Subset(whole, some).checksum != Subset(changed, some).checksum
    splits, _ = pack.read(packed)
    one = Joined([splits["train"], splits["test"]]).checksum
    assert one == Joined([Memory(splits["train"].tensor()), Memory(splits["test"].tensor())]).checksum
    assert one != Joined([splits["train"], Memory(splits["test"].tensor() ^ 1)]).checksum
    assert one != Joined([splits["test"], splits["train"]]).checksum


def test_images_that_are_not_there(packed):
    for store in (Memory(torch.from_numpy(IMAGES[:15])), pack.read(packed)[0]["train"]):
        for index in (-1, 15):
            with pytest.raises(IndexError):
                store.take([index])


def test_reads_may_come_in_pieces(packed, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(pack.os, "preadv", lambda handle, views, at: real(handle, [views[0][:7]], at))
    store = pack.read(packed)[0]["train"]
    assert np.array_equal(store.take([3, 14]).numpy(), IMAGES[[3, 14]])
    assert store.is_intact()


def test_a_changed_pixel_is_found_out(packed):
    content = bytearray(packed.read_bytes())
    content[-1] ^= 1
    packed.write_bytes(bytes(content))
    splits, _ = pack.read(packed)
    assert [splits[name].is_intact() for name in ("train", "test")] == [True, False]


def test_what_killed_processes_left_is_swept_away(tmp_path):
    leftover, busy = tmp_path / ".a.pack.999999999.tmp", tmp_path / f".a.pack.{os.getpid()}.tmp"
    for file in (leftover, busy, tmp_path / ".b.pack.999999999.tmp", tmp_path / ".b.npz.999999999.tmp"):
        file.write_bytes(b"half")
        os.utime(file, (0, 0))
    pack.write(tmp_path / "a.pack", {"train": IMAGES}, (3, 8, 8), {})
    assert not leftover.exists()
    assert not (tmp_path / ".b.pack.999999999.tmp").exists()
    assert (tmp_path / ".b.npz.999999999.tmp").exists()  # not ours to remove


def test_a_packed_file_is_a_safetensors_file(packed):
    with safe_open(packed, "pt") as file:
        assert torch.equal(file.get_tensor("test"), torch.from_numpy(IMAGES[15:]))
        assert file.metadata()["format"] == pack.FORMAT


def test_the_note_says_how_it_was_made(packed):
    _, info = pack.read(packed)
    assert (info["crop"], info["name"], info["splits"]["test"]["images"]) == ("center", "x", 5)


def test_packing_takes_a_stream_and_leaves_nothing_when_it_fails(tmp_path):
    def breaks():
        yield from IMAGES[:3]
        raise UserError("bad image")

    with pytest.raises(UserError, match="bad image"):
        pack.write(tmp_path / "a.pack", {"train": breaks()}, (3, 8, 8), {})
    with pytest.raises(UserError, match="nothing to pack"):
        pack.write(tmp_path / "a.pack", {"train": iter([])}, (3, 8, 8), {})
    assert list(tmp_path.iterdir()) == []


def test_one_image_of_another_shape_is_a_bug_not_a_file(tmp_path):
    with pytest.raises(ValueError, match="among those"):
        pack.write(tmp_path / "a.pack", {"train": [IMAGES[0], IMAGES[0][:, :4]]}, (3, 8, 8), {})


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (lambda c: b"", "not a packed file"),
        (lambda c: c[:100], "damaged|not a packed file"),
        (lambda c: c[:-1], "cut short"),
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
def test_damaged_files_are_refused(packed, hurt, words):
    content = packed.read_bytes()
    changed = hurt(content)
    assert changed != content
    packed.write_bytes(changed)
    with pytest.raises(UserError, match=words) as error:
        pack.read(packed)
    assert "\n" not in str(error.value)


def test_a_file_cut_while_it_is_read(packed):
    store = pack.read(packed)[0]["train"]
    with open(packed, "r+b") as file:
        file.truncate(pack.HEADER + 100)
    with pytest.raises(UserError, match="cut short"):
        store.take([14])
