import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc.data import pack
from dualmcmc.errors import UserError
from dualmcmc.tasks.inputs import batches, images_for, set_for
from tests.data import makers
from tests.data.makers import pixels


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_the_runs_own(run):
    given = images_for(run, None)
    assert (len(given.store), given.what) == (359, "held-out images")
    assert (given.origin["source"], given.origin["crop"], given.origin["images"]) == ("digits", "center", 1438)
    assert given.origin["notes"] == []
    some = given.some(50, seed=1)
    assert len(some.store) == 50
    assert some.origin["used"] == "50 of 359"
    assert some.store.checksum == given.some(50, seed=1).store.checksum != given.some(50, seed=2).store.checksum
    assert len(set(some.store.indices)) == 50
    assert some.store.indices.max() > 200  # from all over the set
    assert given.some(1000, seed=1) is given
    with pytest.raises(UserError, match="-n"):
        given.some(0, seed=1)


def test_images_of_another_size_and_mode_are_converted_and_that_is_said(run, tmp_path):
    Image.new("RGB", (40, 30), (10, 200, 30)).save(tmp_path / "a.png")
    given = images_for(run, tmp_path / "a.png")
    assert given.store.shape == (1, 1, 8, 8)
    (note,) = given.origin["notes"]
    assert "converted to 8x8 grey from 40x30 RGB (crop center, resize lanczos)" in note
    assert images_for(run, tmp_path / "a.png", "none").origin["crop"] == "none"
    for size in (9, 10, 11, 12):
        Image.new("L", (size, size)).save(tmp_path / f"{size}.png")
    (note,) = images_for(run, tmp_path).origin["notes"]
    assert "and 2 other shapes" in note


def test_images_of_the_right_shape_are_not_remarked_on(run, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert images_for(run, tmp_path).origin["notes"] == []


def test_a_packed_file_of_another_shape_is_refused(run, tmp_path):
    for shape in ((1, 16, 16), (3, 8, 8)):
        path = tmp_path / "other.pack"
        pack.write(path, {"train": np.zeros((2, *shape), np.uint8)}, shape, {"crop": "center", "resize": "lanczos"})
        with pytest.raises(UserError, match="this run was trained on 8x8 of 1: pack them again with --size 8"):
            images_for(run, path)
    path = tmp_path / "right.pack"
    pack.write(path, {"train": np.zeros((2, 1, 8, 8), np.uint8)}, (1, 8, 8), {"crop": "center", "resize": "lanczos"})
    assert len(images_for(run, path).store) == 2


def test_tensors_of_another_shape_are_refused(run):
    for shape in ((2, 3, 8, 8), (2, 1, 16, 16), (1, 8, 8)):
        x = torch.zeros(shape)
        for use in (run.energy, run.infer, run.reconstruct, run.revise_x, lambda x: run.revise_z(run.prior(2), x)):
            with pytest.raises(UserError, match=r"trained on images of 1x8x8 .* these are of"):
                use(x)


def test_other_sets_by_name_by_place_and_both(run, cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1, seed=1))
    name, given = set_for(run, "mnist")
    assert (name, len(given.store), given.origin["split"]) == ("mnist", 3, "test")
    assert any("converted to 8x8 grey from 28x28 grey" in note for note in given.origin["notes"])
    elsewhere = makers.mnist(tmp_path / "there", pixels(6, 28, 1), pixels(4, 28, 1))
    assert len(set_for(run, f"mnist={elsewhere}")[1].store) == 4
    assert len(set_for(run, "mnist:train")[1].store) == 6
    assert len(set_for(run, f"mnist:train={elsewhere}")[1].store) == 6
    (tmp_path / "own").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "own" / "a.png")
    assert set_for(run, str(tmp_path / "own"))[0] == "own"
    for word, message in [
        ("mnits", "Did you mean 'mnist'"),
        ("mnist=", "names no place"),
        ("mnist:", "names no split"),
        ("mnist:extra", "no split 'extra'"),
        ("", "no named set and no place"),
        ("cifar10", "data fetch cifar10"),
        ("/absent/folder", "no named set and no place"),
    ]:
        with pytest.raises(UserError, match=message):
            set_for(run, word)


def test_batches_are_even_and_complete(run):
    run.config = dualmcmc.load_config("digits", ["sampling.batch=100"])
    store = images_for(run, None).store
    found = list(batches(run, store))
    assert [len(part) for part, _ in found] == [90, 90, 90, 89]
    assert np.concatenate([part for part, _ in found]).tolist() == list(range(359))
    assert all(x.min() >= -1 and x.max() <= 1 for _, x in found)


def test_an_array_of_an_npz_by_name(run, tmp_path):
    path = tmp_path / "s.npz"
    np.savez(path, revised=np.zeros((3, 8, 8, 1), np.uint8), generator=np.ones((2, 8, 8, 1), np.uint8), z=np.zeros(4))
    assert len(images_for(run, f"{path}:generator").store) == 2
    assert set_for(run, f"{path}:revised")[0] == "s.npz:revised"
    assert len(set_for(run, f"{path}:revised")[1].store) == 3
    for word, message in [
        (path, r"several arrays of images \(revised, generator\)"),
        (f"{path}:genrator", "Did you mean"),
    ]:
        with pytest.raises(UserError, match=message):
            images_for(run, word)
    np.savez(path, z=np.zeros(4), only=np.zeros((3, 8, 8, 1), np.uint8))
    assert len(images_for(run, path).store) == 3
