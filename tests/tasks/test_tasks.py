import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc import data
from dualmcmc.errors import UserError
from dualmcmc.pictures import from_uint8
from dualmcmc.tasks.reconstruct import images_for, reconstruct, save_picture
from dualmcmc.tasks.sample import sample
from dualmcmc.tasks.summary import summarise


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run)


def test_samples_as_pixels_and_as_a_picture(run, tmp_path):
    numbers = sample(run, 9, None, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["generator"].shape == stored["revised"].shape == (9, 8, 8, 1)
        assert stored["revised"].dtype == np.uint8
    assert numbers["steps"] == 3
    sample(run, 9, 20, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[0] > 2 * 3 * 64
    for bad in ("a.jpg", "absent/a.png"):
        with pytest.raises(UserError, match="--out"):
            sample(run, 9, None, tmp_path / bad)
    with pytest.raises(UserError, match="-n"):
        sample(run, 0, None, tmp_path / "a.png")


def test_the_x_chain_lowers_the_energy(run, tmp_path):
    numbers = sample(run, 64, 30, tmp_path / "a.npz")
    assert numbers["energy_revised"] < numbers["energy_generator"]
    assert numbers["x_moved"] > 0


def test_reconstruction_errors_are_what_they_say(run, tmp_path):
    images, what = images_for(run, None)
    assert (len(images), what) == (359, "held-out images")
    result = reconstruct(run, images)
    x = from_uint8(images)
    assert result.mse_inference == pytest.approx(float((x - run.reconstruct(x, steps=0)).square().mean()), rel=1e-5)
    assert reconstruct(run, images, steps=0).mse_revised == pytest.approx(result.mse_inference)
    assert reconstruct(run, images, steps=100).mse_revised < result.mse_inference
    save_picture(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_images_of_ones_own(run, tmp_path):
    Image.new("RGB", (40, 30), (10, 200, 30)).save(tmp_path / "a.png")
    images, what = images_for(run, tmp_path / "a.png")
    assert images.shape == (1, 1, 8, 8)
    assert "a.png" in what
    assert reconstruct(run, images).revised.shape == images.shape


def test_summary(run):
    numbers = summarise(run, data.load(run.config.data))
    assert numbers["samples"] == 1438
    assert numbers["measured_on"] == "359 held-out images"
    assert numbers["fd_pixels_real"] == pytest.approx(0.1, abs=0.03)
    assert numbers["fd_pixels_generator"] > numbers["fd_pixels_real"]  # barely trained
    assert torch.isfinite(torch.tensor([v for v in numbers.values() if isinstance(v, float)])).all()
