import math
from dataclasses import replace

import pytest
import torch

import dualmcmc
from dualmcmc.data.store import MemoryStore
from dualmcmc.metrics.pixels import psnr, ssim
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.reconstruct import Similarity, compare_starts, reconstruct, save_picture
from dualmcmc.utils.images import from_uint8, to_uint8


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_reconstruction_errors(run, tmp_path):
    images = images_for(run).store
    result = reconstruct(run, images)
    x = from_uint8(images.tensor())
    y = run.reconstruct(x, steps=0)
    assert result.inference["mse"] == pytest.approx(float((x - y).square().mean()), rel=1e-5)
    assert result.inference["mse_0_to_1"] == pytest.approx(float(((x - y) / 2).square().mean()), rel=1e-5)
    assert result.inference["psnr_db"] == pytest.approx(float(psnr(x, y).mean()), rel=1e-5)
    assert result.inference["ssim"] == pytest.approx(float(ssim(x, y).mean()), rel=1e-5)
    assert reconstruct(run, images, steps=0).revised == pytest.approx(result.inference)
    save_picture(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_z_chain_lowers_the_error(learned):
    result = reconstruct(learned, images_for(learned).store, steps=30)
    assert result.revised["mse"] < 0.9 * result.inference["mse"]
    assert result.revised["psnr_db"] > result.inference["psnr_db"]
    assert result.revised["ssim"] > result.inference["ssim"]
    assert result.captions() == ("image", "inference", "inference + z-chain (30 noise-free steps)")
    assert reconstruct(learned, images_for(learned).store, steps=1, temperature=1.0).captions()[2].endswith("(1 step)")


def test_first_images_are_kept_for_any_batch_size(run):
    images = images_for(run).store
    whole = reconstruct(run, images, steps=0)
    run.config = replace(run.config, sampling=replace(run.config.sampling, batch=50))
    parts = reconstruct(run, images, steps=0)
    assert whole.inferred.shape == parts.inferred.shape == (64, 1, 8, 8)
    x = from_uint8(images.first(64))
    assert (parts.inferred.int() - to_uint8(run.reconstruct(x, steps=0)).int()).abs().max() <= 1
    assert torch.equal(parts.original, images.first(64))
    assert parts.inference == pytest.approx(whole.inference, rel=1e-5)
    assert len(reconstruct(run, images, keep=7).rebuilt) == 7


def test_similarity_is_a_mean_over_images():
    x, y = torch.rand(2, 9, 1, 8, 8) * 2 - 1
    parts, whole = Similarity(), Similarity()
    whole.add(x, y)
    parts.add(x[:1], y[:1])
    parts.add(x[1:], y[1:])
    assert parts.numbers() == pytest.approx(whole.numbers())
    outside = Similarity()
    outside.add(torch.ones(1, 1, 8, 8), torch.full((1, 1, 8, 8), 1.7))  # clamped, as in a picture
    assert outside.numbers()["mse"] == 0
    for name in ("psnr_db", "psnr_of_mean_mse_db"):
        assert outside.numbers()[name] == pytest.approx(20 * math.log10(2 * 255), abs=0.01)  # not infinite
    assert whole.numbers()["psnr_of_mean_mse_db"] == pytest.approx(10 * math.log10(1 / whole.numbers()["mse_0_to_1"]))
    assert whole.numbers()["psnr_of_mean_mse_db"] < whole.numbers()["psnr_db"]


def test_compare_starts(learned):
    images = MemoryStore(images_for(learned).store.first(100))
    result = compare_starts(learned, images)
    from_inference = ["inference", "inference+2", "inference+2 noise-free"]
    assert list(result) == [*from_inference, *(f"noise+{k}" for k in (2, 10, 15, 20, 25, 30))]
    assert list(compare_starts(learned, images, from_noise=False)) == from_inference
    errors = [result[f"noise+{k}"]["mse"] for k in (2, 10, 20, 30)]
    assert errors == sorted(errors, reverse=True)  # longer chains have smaller errors
    assert result["inference+2"]["mse"] < result["inference"]["mse"]
    assert result["inference+2"]["mse"] < result["noise+2"]["mse"]
    assert result["inference+2 noise-free"]["mse"] < result["inference+2"]["mse"]
    x = from_uint8(images.tensor())
    alone = float((learned.reconstruct(x, steps=0) - x).square().mean())
    assert result["inference"]["mse"] == pytest.approx(alone, rel=1e-5)
    assert result == compare_starts(learned, images)  # independent of earlier draws


def test_lengths_of_chains_from_noise(learned, monkeypatch):
    images, calls = MemoryStore(images_for(learned).store.first(10)), []
    real = learned.revise_z

    def counted(z, x, steps=None, rng=None, **options):
        calls.append((z, steps))
        return real(z, x, steps, rng, **options)

    monkeypatch.setattr(learned, "revise_z", counted)
    compare_starts(learned, images)
    (first, _), (second, _), *chain = calls
    assert [steps for _, steps in chain] == [2, 8, 5, 5, 5, 5]  # total 2, 10, 15, 20, 25, 30
    assert torch.equal(first, learned.infer(from_uint8(images.tensor())).mean)
    assert torch.equal(first, second)  # with noise, and without
    assert torch.equal(chain[0][0], learned.prior(10, learned.generator_for("from noise")))


def test_chain_in_two_parts_is_the_same_chain(learned):
    """`compare_starts` continues the chain from noise after each evaluation."""
    x = from_uint8(images_for(learned).store.first(4))
    z = learned.prior(4, torch.Generator().manual_seed(1))
    rng = [torch.Generator().manual_seed(2) for _ in range(2)]
    in_two = learned.revise_z(learned.revise_z(z, x, 10, rng[0]), x, 5, rng[0])
    assert torch.allclose(in_two, learned.revise_z(z, x, 15, rng[1]))


def test_temperature_of_the_z_chain(learned):
    """Temperature 0 is gradient descent, whatever the random numbers."""
    images = MemoryStore(images_for(learned).store.first(20))
    x = from_uint8(images.tensor())
    z = learned.infer(x).mean
    cold = dualmcmc.load(learned.file.parent, overrides=["teaching.z_chain.temperature=0"], device="cpu")
    assert not torch.equal(*(learned.revise_z(z, x, rng=torch.Generator().manual_seed(k)) for k in range(2)))
    first, second = (cold.revise_z(z, x, rng=torch.Generator().manual_seed(k)) for k in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, learned.revise_z(z, x, temperature=0.0))
    assert torch.equal(learned.reconstruct(x), learned.generate(first))  # noise-free by default
    rng = torch.Generator()
    for warm in (None, 1.0):  # the run's setting is 1
        sampled = learned.revise_z(z, x, rng=rng.manual_seed(0))
        assert torch.equal(learned.reconstruct(x, rng=rng.manual_seed(0), temperature=warm), learned.generate(sampled))
    assert reconstruct(learned, images).revised == reconstruct(cold, images, temperature=None).revised
    assert reconstruct(learned, images).revised != reconstruct(learned, images, temperature=None).revised
    result = compare_starts(cold, images, from_noise=False)
    assert list(result) == ["inference", "inference+2"]
    noise_free = compare_starts(learned, images, from_noise=False)["inference+2 noise-free"]
    assert result["inference+2"] == pytest.approx(noise_free)
