import pytest
import torch

import dualmcmc
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.interpolate import between, inferred_pairs, interpolate, picture, prior_pairs
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, strip, to_uint8


def test_linear():
    a, b = torch.randn(2, 5, 3)
    z = between(a, b, 5)
    for index, t in enumerate((0, 0.25, 0.5, 0.75, 1)):
        assert torch.allclose(z[:, index], (1 - t) * a + t * b)


def test_spherical_keeps_the_norm_and_rotates_uniformly():
    a = torch.tensor([[2.0, 0.0, 0.0]])
    b = torch.tensor([[0.0, 2.0, 0.0]])
    z = between(a, b, 7, spherical=True)[0]
    assert torch.allclose(z.norm(dim=1), torch.full((7,), 2.0))
    cosines = (z[1:] * z[:-1]).sum(1) / 4
    assert torch.allclose(cosines, torch.cos(torch.tensor(torch.pi / 12)).expand(6), atol=1e-6)
    assert torch.allclose(between(a, 3 * b, 3, spherical=True)[0, 1].norm(), torch.tensor(4.0))  # norms 2 and 6


@pytest.mark.parametrize("factor", [1.0, 2.0, -1.0, 0.0])
def test_spherical_between_parallel_latents_is_linear(factor):
    a = torch.tensor([[1.0, 2.0, -1.0]])
    z = between(a, factor * a, 5, spherical=True)
    assert torch.allclose(z, between(a, factor * a, 5), atol=1e-5)


@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize("steps", [0, 10])
def test_ends_are_reconstructions(learned_folder, spherical, steps):
    run = dualmcmc.load(learned_folder, "cpu", overrides=[f"teaching.z_chain.steps={steps}"])
    x = from_uint8(images_for(run).store.first(6))
    result = interpolate(run, *inferred_pairs(run, x), 5, spherical)
    rebuilt = run.reconstruct(x, rng=run.generator_for("z-chain"), temperature=None)
    assert torch.allclose(result.images[:, 0], rebuilt[::2], atol=1e-5)
    assert torch.allclose(result.images[:, -1], rebuilt[1::2], atol=1e-5)


def test_numbers_and_picture(learned):
    a, b = prior_pairs(learned, 3)
    assert not torch.equal(a, b)
    result = interpolate(learned, *prior_pairs(learned, 3), points=6)
    assert result.images.shape == (3, 6, 1, 8, 8)
    change = (result.images[:, 1:] - result.images[:, :-1]).square().mean((2, 3, 4)).sqrt()
    assert result.numbers["pixel_change_rms_mean"] == pytest.approx(float(change.mean()))
    assert result.numbers["pixel_change_rms_max"] == pytest.approx(float(change.max()))
    assert result.numbers["max_to_mean_change"] >= 1
    assert len(result.numbers["energy"]) == 6
    two_points = interpolate(learned, learned.prior(2), learned.prior(2) * 0 + learned.prior(1), points=2)
    assert two_points.numbers["max_to_mean_change"] == pytest.approx(1)
    one, both = picture({"prior draws": result}), picture({"prior draws": result, "held-out images": result})
    assert torch.equal(both[:, : one.shape[1]], one)
    assert both.shape[1] > 2 * one.shape[1]
    frames = [to_uint8(result.images[:, k]) for k in range(6)]
    labelled = strip(frames, 3, ["t = 0", "0.2", "0.4", "0.6", "0.8", "1"])
    assert torch.equal(one[:, -labelled.shape[1] :], labelled)
    assert one.shape[1] > labelled.shape[1]
    with pytest.raises(UserError, match="--points"):
        interpolate(learned, *prior_pairs(learned, 1), points=1)
    with pytest.raises(UserError, match="at least two"):
        inferred_pairs(learned, torch.zeros(1, 1, 8, 8))


def test_images_are_no_latents(finished_run):
    run = dualmcmc.load(finished_run, "cpu")
    with pytest.raises(UserError, match=r"run\.infer\(x\)\.mean"):
        interpolate(run, torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8))
    with pytest.raises(UserError, match=r"expected \(2, 4\)"):
        interpolate(run, torch.zeros(2, 4), torch.zeros(3, 4))
