import numpy as np
import pytest
import scipy.linalg
import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.data.store import Memory
from dualmcmc.errors import UserError
from dualmcmc.metrics import features as features_module
from dualmcmc.metrics.features import Features, load_features
from dualmcmc.pictures import to_uint8
from dualmcmc.tasks.evaluate import evaluate
from tests.networks import Tiny, random_layers, released, sha256


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu", seed=2)


@pytest.fixture
def images(run):
    own = data.load(run.config.data)
    return data.Images(Memory(own.train.first(200)), Memory(own.test.first(100)))


def take():
    return Features(Tiny(), 48, "cpu", standard=False, checksum="tiny")


def fid(a, b):
    """From the definition."""
    a, b = a.double().numpy(), b.double().numpy()
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(ca @ cb).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)


def test_the_distance_is_of_bytes_to_all_training_images_for_both_kinds(run, images):
    result = evaluate(run, ["fid"], 200, images, take())
    ((_, start, revised),) = run.draw(200)
    real = take()(images.train.tensor())
    for numbers, samples in ((result.generator, start), (result.ebm, revised)):
        expected = fid(take()(to_uint8(samples)), real)
        assert numbers == {"frechet_own_network": pytest.approx(expected, abs=1e-3)}
    assert result.generator != result.ebm
    assert result.reconstruction == {}
    assert {"reference", "drawing", "features", "numbers"} == set(result.seconds)


def test_the_chain_is_the_one_asked_for(finished_run, images):
    found = []
    for steps in (0, 40):
        run = dualmcmc.load(finished_run, "cpu", overrides=[f"sampling.steps={steps}"])
        found.append(evaluate(run, ["fid"], 100, images, take()))
    assert found[0].generator == found[0].ebm
    assert found[1].generator == found[0].generator  # the same latents
    assert found[1].ebm != found[0].ebm


def test_every_metric(run, images, tmp_path, monkeypatch):
    """With an Inception of random weights in the released layout, which has the classifier."""
    path = released(tmp_path / "a.pth", random_layers(), 0.1 * torch.randn(1008, 2048))
    monkeypatch.setattr(features_module, "RELEASE", sha256(path))
    few = data.Images(Memory(images.train.first(12)), images.test)
    result = evaluate(run, ["fid", "is", "kid", "precision", "recall", "ssim"], 12, few, load_features(path))
    assert list(result.generator) == ["fid", "is", "is_std", "kid", "kid_std", "precision", "recall"]
    assert result.generator["fid"] > 0
    assert result.generator["is"] >= 1
    assert 0 <= result.ebm["precision"] <= 1
    assert set(result.reconstruction["inference"]) == {"ssim"}
    assert result.left_out == {}


def test_the_inception_score_is_left_out_without_the_classifier(run, images):
    result = evaluate(run, ["fid", "is"], 20, images, take())
    assert "is" not in result.generator
    assert "needs the classifier" in result.left_out["is"]
    with pytest.raises(UserError, match=r"nothing is left to measure.*needs the classifier"):
        evaluate(run, ["is"], 20, images, take())


def test_reconstructions_need_no_inception(run, images):
    result = evaluate(run, ["mse", "psnr"], images=images)
    assert set(result.reconstruction["inference+2"]) == {"mse", "mse_unit", "psnr"}
    assert result.generator == {}
    with pytest.raises(UserError, match="'dualmcmc data fetch inception' gets them"):
        evaluate(run, ["fid"], 20, images)


def test_a_run_is_measured_on_its_own_images(run):
    own = data.load(run.config.data)
    assert evaluate(run, ["mse"]).reconstruction["inference"] == pytest.approx(
        evaluate(run, ["mse"], images=own).reconstruction["inference"], rel=1e-6
    )


def test_a_number_does_not_depend_on_what_else_is_measured(run, images):
    alone = evaluate(run, ["mse"], 30, images, take()).reconstruction
    both = evaluate(run, ["fid", "mse"], 30, images, take())
    assert both.reconstruction == alone
    assert evaluate(run, ["fid"], 30, images, take()).ebm == both.ebm


def test_bad_requests(run, images):
    with pytest.raises(UserError, match=r"no metric 'fdi'.*Did you mean 'fid'"):
        evaluate(run, ["fdi"], 20, images, take())
    with pytest.raises(UserError, match="--samples must be at least 2"):
        evaluate(run, ["fid"], 1, images, take())
