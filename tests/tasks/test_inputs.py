import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc import config_io
from dualmcmc.data import pack
from dualmcmc.engine import checkpoint
from dualmcmc.tasks.inputs import batches, dataset_for, held_out_images, images_for
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.makers import pixels


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_own_images(run):
    given = images_for(run)
    assert (len(given.store), given.what) == (359, "held-out images")
    assert (given.origin["source"], given.origin["crop"], given.origin["images"]) == ("digits", "center", 1438)
    assert given.origin["notes"] == []
    subset = given.subset(50, seed=1)
    assert len(subset.store) == 50
    assert subset.origin["used"] == "50 of 359"
    assert subset.store.checksum == given.subset(50, seed=1).store.checksum != given.subset(50, seed=2).store.checksum
    assert len(set(subset.store.indices)) == 50
    assert subset.store.indices.max() > 200  # from the whole dataset
    assert given.subset(1000, seed=1) is given
    with pytest.raises(UserError, match="at least 1, not 0"):
        given.subset(0, seed=1)


def test_other_sizes_and_modes_are_converted_with_a_note(run, tmp_path):
    Image.new("RGB", (40, 30), (10, 200, 30)).save(tmp_path / "a.png")
    given = images_for(run, tmp_path / "a.png")
    assert given.store.shape == (1, 1, 8, 8)
    (note,) = given.origin["notes"]
    assert "converted to 8x8 greyscale from 40x30 RGB (crop center, resize lanczos)" in note
    for size in (9, 10, 11, 12):
        Image.new("L", (size, size)).save(tmp_path / f"{size}.png")
    (note,) = images_for(run, tmp_path).origin["notes"]
    assert "and 2 other shapes" in note


def test_overrides_apply_to_other_images_only(finished_run, tmp_path):
    """data.crop, data.resize and data.skip_bad of a loaded run are for images at a path and for other datasets."""
    wide = Image.new("L", (16, 8))
    wide.paste(255, (0, 0, 4, 8))
    wide.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("not an image")
    changes = ["data.crop=none", "data.resize=box", "data.skip_bad=true"]
    run = dualmcmc.load(finished_run, "cpu", overrides=changes)
    for given in (images_for(run, tmp_path), dataset_for(run, str(tmp_path))[1]):
        assert given.store.tensor()[0, 0, 0].tolist() == [255, 255, 0, 0, 0, 0, 0, 0]  # squeezed, not cropped
        assert (given.origin["crop"], given.origin["resize"]) == ("none", "box")
        assert "b.png" in given.origin["notes"][0]
    own = held_out_images(run)
    assert own.origin == images_for(dualmcmc.load(finished_run, "cpu")).origin
    for change in changes:
        name = change.partition("=")[0]
        with pytest.raises(UserError, match=f"{name} applies to --images only: the run's own images keep theirs"):
            images_for(dualmcmc.load(finished_run, "cpu", overrides=[change]))


def test_data_path_override_applies_to_own_images(finished_run, tmp_path):
    """A run trained on a folder that was moved."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L", (8, 8), 80 * number).save(tmp_path / name / f"{number}.png")
    run = dualmcmc.load(finished_run, "cpu")
    moved = replace(run.config.data, source="folder", path=str(tmp_path / "old"), holdout=0.0)
    file = tmp_path / "run.safetensors"
    tensors, info, _ = checkpoint.load(run.file)
    checkpoint.save(file, tensors, info | {"config": config_io.to_tree(replace(run.config, data=moved))})
    shutil.rmtree(tmp_path / "old")
    run = dualmcmc.load(file, "cpu", overrides=[f"data.path={tmp_path / 'new'}"])
    assert len(images_for(run).store) == 3


def test_no_note_without_conversion(run, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert images_for(run, tmp_path).origin["notes"] == []


def test_packed_file_of_another_shape_is_refused(run, tmp_path):
    for shape in ((1, 16, 16), (3, 8, 8)):
        path = tmp_path / "other.pack"
        pack.write(path, {"train": np.zeros((2, *shape), np.uint8)}, shape, {"crop": "center", "resize": "lanczos"})
        with pytest.raises(UserError, match="this run was trained on 8x8 with 1: pack them again with --size 8"):
            images_for(run, path)
    path = tmp_path / "right.pack"
    pack.write(path, {"train": np.zeros((2, 1, 8, 8), np.uint8)}, (1, 8, 8), {"crop": "center", "resize": "lanczos"})
    assert len(images_for(run, path).store) == 2


def test_tensors_of_another_shape_are_refused(run):
    for shape in ((2, 3, 8, 8), (2, 1, 16, 16), (2, 8, 16), (8,)):
        x = torch.zeros(shape)
        for use in (run.energy, run.infer, run.reconstruct, run.revise_x, lambda x: run.revise_z(run.prior(2), x)):
            with pytest.raises(UserError, match=r"trained on images of shape 1x8x8 .*; these have"):
                use(x)


def test_other_datasets_by_name_and_path(run, cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(3, 28, 1, seed=1))
    name, given = dataset_for(run, "mnist")
    assert (name, len(given.store), given.origin["split"]) == ("mnist", 3, "test")
    assert any("converted to 8x8 greyscale from 28x28 grey" in note for note in given.origin["notes"])
    elsewhere = makers.mnist(tmp_path / "there", pixels(6, 28, 1), pixels(4, 28, 1))
    assert len(dataset_for(run, f"mnist={elsewhere}")[1].store) == 4
    assert len(dataset_for(run, "mnist:train")[1].store) == 6
    assert len(dataset_for(run, f"mnist:train={elsewhere}")[1].store) == 6
    (tmp_path / "own").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "own" / "a.png")
    assert dataset_for(run, str(tmp_path / "own"))[0] == "own"
    for word, message in [
        ("mnits", "Did you mean 'mnist'"),
        ("mnist=", "has no path"),
        ("mnist:", "no split after the colon"),
        ("mnist:extra", "no split 'extra'"),
        ("", "neither a named dataset nor an existing path"),
        ("cifar10", "data fetch cifar10"),
        ("/absent/folder", "neither a named dataset nor an existing path"),
    ]:
        with pytest.raises(UserError, match=message):
            dataset_for(run, word)


def test_batches_are_equal_and_complete(run):
    run.config = dualmcmc.load_config("digits", ["sampling.batch=100"])
    store = images_for(run).store
    parts = list(batches(run, store))
    assert [len(indices) for indices, _ in parts] == [90, 90, 90, 89]
    assert np.concatenate([indices for indices, _ in parts]).tolist() == list(range(359))
    assert all(x.min() >= -1 and x.max() <= 1 for _, x in parts)


def test_array_of_npz_by_name(run, tmp_path):
    path = tmp_path / "s.npz"
    np.savez(path, revised=np.zeros((3, 8, 8, 1), np.uint8), generator=np.ones((2, 8, 8, 1), np.uint8), z=np.zeros(4))
    assert len(images_for(run, f"{path}:generator").store) == 2
    assert dataset_for(run, f"{path}:revised")[0] == "s.npz:revised"
    assert len(dataset_for(run, f"{path}:revised")[1].store) == 3
    for word, message in [
        (path, r"several arrays of images \(revised, generator\)"),
        (f"{path}:genrator", "Did you mean"),
    ]:
        with pytest.raises(UserError, match=message):
            images_for(run, word)
    np.savez(path, z=np.zeros(4), only=np.zeros((3, 8, 8, 1), np.uint8))
    assert len(images_for(run, path).store) == 3
