from dataclasses import replace

import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc.pictures import from_uint8, to_uint8
from dualmcmc.tasks.reconstruct import images_for, reconstruct, save_picture


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_reconstruction_errors_are_what_they_say(run, tmp_path):
    images, what, origin = images_for(run, None)
    assert (len(images), what) == (359, "held-out images")
    assert (origin["source"], origin["crop"], origin["images"]) == ("digits", "center", 1438)
    result = reconstruct(run, images)
    x = from_uint8(images.tensor())
    assert result.mse_inference == pytest.approx(float((x - run.reconstruct(x, steps=0)).square().mean()), rel=1e-5)
    assert reconstruct(run, images, steps=0).mse_revised == pytest.approx(result.mse_inference)
    assert reconstruct(run, images, steps=100).mse_revised < result.mse_inference
    save_picture(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_images_of_ones_own(run, tmp_path):
    Image.new("RGB", (40, 30), (10, 200, 30)).save(tmp_path / "a.png")
    images, what, origin = images_for(run, tmp_path / "a.png")
    assert images.shape == (1, 1, 8, 8)
    assert (origin["crop"], origin["path"]) == ("center", str(tmp_path / "a.png"))
    assert images_for(run, tmp_path / "a.png", "none")[2]["crop"] == "none"
    assert "a.png" in what
    assert reconstruct(run, images).revised.shape == images.shape


def test_only_the_first_images_are_kept_whatever_the_batch(run):
    images = images_for(run, None)[0]
    whole = reconstruct(run, images, steps=0)
    run.config = replace(run.config, sampling=replace(run.config.sampling, batch=50))
    parts = reconstruct(run, images, steps=0)
    assert whole.inferred.shape == parts.inferred.shape == (64, 1, 8, 8)
    x = from_uint8(images.first(64))
    assert (parts.inferred.int() - to_uint8(run.reconstruct(x, steps=0)).int()).abs().max() <= 1
    assert torch.equal(parts.original, images.first(64))
    assert parts.mse_inference == pytest.approx(whole.mse_inference, rel=1e-5)
    assert len(reconstruct(run, images, keep=7).revised) == 7
