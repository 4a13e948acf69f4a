import sys

import numpy as np
import pytest
import scipy.linalg

import dualmcmc
from dualmcmc import data
from dualmcmc.data.store import MemoryStore
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.metrics.quality import missing_torchmetrics
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, to_uint8
from tests.networks import Tiny, TinyInception


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu", seed=2)


@pytest.fixture
def images(run):
    own = data.load(run.trained_data)
    return data.DataSplits(MemoryStore(own.train.first(60)), MemoryStore(own.test.first(40)))


def tiny_features():
    return FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum="tiny")


def fid(a, b):
    """From the definition."""
    a, b = a.double().numpy(), b.double().numpy()
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(ca @ cb).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(ca + cb - 2 * root)


def test_fid_of_both_kinds_of_samples(run, images):
    result = evaluate(run, ["fid"], 100, images, tiny_features())
    ((_, start, revised),) = run.sample_batches(100)
    real = tiny_features()(images.train.tensor())
    for numbers, samples in ((result.generator, start), (result.ebm, revised)):
        expected = fid(tiny_features()(to_uint8(samples)), real)
        assert numbers == {"frechet_custom_network": pytest.approx(expected, abs=1e-3)}
    assert result.generator != result.ebm
    assert result.reconstruction == {}
    assert set(result.seconds) == {"reference", "sampling", "features", "numbers"}


def test_chain_overrides_apply(finished_run, images):
    results = []
    for steps in (0, 40):
        run = dualmcmc.load(finished_run, "cpu", overrides=[f"sampling.steps={steps}"])
        results.append(evaluate(run, ["fid"], 60, images, tiny_features()))
    assert results[0].generator == results[0].ebm
    assert results[1].generator == results[0].generator  # the same latents
    assert results[1].ebm != results[0].ebm


def test_every_metric(run, images):
    features = FeatureExtractor(TinyInception(), 48, "cpu", standard=True, checksum="")
    result = evaluate(run, ["fid", "is", "kid", "precision", "recall", "ssim"], 40, images, features)
    assert list(result.generator) == ["fid", "is", "is_std", "kid", "kid_std", "precision", "recall"]
    assert result.generator["fid"] > 0
    assert result.generator["is"] >= 1
    assert 0 <= result.ebm["precision"] <= 1
    assert set(result.reconstruction["inference"]) == {"ssim"}
    assert result.skipped == {}


def test_inception_score_without_classifier_is_skipped(run, images):
    result = evaluate(run, ["fid", "is"], 20, images, tiny_features())
    assert "is" not in result.generator
    assert "needs the classifier" in result.skipped["is"]
    with pytest.raises(UserError, match=r"nothing to measure.*needs the classifier"):
        evaluate(run, ["is"], 20, images, tiny_features())


def test_reconstruction_metrics_need_no_inception(run, images):
    result = evaluate(run, ["mse", "psnr"], images=images)
    assert set(result.reconstruction["inference+2"]) == {"mse", "mse_0_to_1", "psnr_db", "psnr_of_mean_mse_db"}
    assert list(result.train_reconstruction) == ["inference", "inference+2", "inference+2 noise-free"]
    held_out, train = result.reconstruction["inference"]["mse"], result.train_reconstruction["inference"]["mse"]
    x = from_uint8(images.train.first(len(images.test)))
    assert train == pytest.approx(float((run.reconstruct(x, steps=0) - x).square().mean()), rel=1e-4)
    assert train != held_out
    assert result.generator == {}
    with pytest.raises(UserError, match="'dualmcmc data fetch inception'"):
        evaluate(run, ["fid"], 20, images)


def test_default_images_are_those_of_the_run(run):
    own = data.load(run.trained_data)
    assert evaluate(run, ["mse"]).reconstruction == evaluate(run, ["mse"], images=own).reconstruction


def test_metrics_do_not_affect_each_other(run, images):
    alone = evaluate(run, "mse", 30, images, tiny_features()).reconstruction
    both = evaluate(run, ["fid", "mse"], 30, images, tiny_features())
    assert both.reconstruction == alone
    assert evaluate(run, ["fid"], 30, images, tiny_features()).ebm == both.ebm


def test_invalid_arguments(run, finished_run, images):
    with pytest.raises(UserError, match=r"unknown metric 'fdi'.*Did you mean 'fid'"):
        evaluate(run, ["fdi"], 20, images, tiny_features())
    with pytest.raises(UserError, match="-n must be at least 2"):
        evaluate(run, ["fid"], 1, images, tiny_features())
    with pytest.raises(UserError, match=r"data\.crop applies to --images only"):
        evaluate(dualmcmc.load(finished_run, "cpu", overrides=["data.crop=none"]), ["mse"], images=images)


def test_metrics_without_torchmetrics_are_skipped(run, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert "dualmcmc[metrics]" in missing_torchmetrics()
    result = evaluate(run, "fid,kid", 20, images, tiny_features())
    assert "dualmcmc[metrics]" in result.skipped["kid"]
    assert result.ebm.keys() == {"frechet_custom_network"}
