import pytest
import torch

import dualmcmc
from dualmcmc.errors import UserError
from dualmcmc.pictures import from_uint8
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.interpolate import between, inferred_pairs, interpolate, picture, prior_pairs


def test_linear_is_the_papers():
    a, b = torch.randn(2, 5, 3)
    z = between(a, b, 5)
    for index, t in enumerate((0, 0.25, 0.5, 0.75, 1)):
        assert torch.allclose(z[:, index], (1 - t) * a + t * b)


def test_spherical_keeps_to_the_sphere_and_turns_evenly():
    a = torch.tensor([[2.0, 0.0, 0.0]])
    b = torch.tensor([[0.0, 2.0, 0.0]])
    z = between(a, b, 7, spherical=True)[0]
    assert torch.allclose(z.norm(dim=1), torch.full((7,), 2.0))
    cosines = (z[1:] * z[:-1]).sum(1) / 4
    assert torch.allclose(cosines, torch.cos(torch.tensor(torch.pi / 12)).expand(6), atol=1e-6)
    assert torch.allclose(between(a, 3 * b, 3, spherical=True)[0, 1].norm(), torch.tensor(4.0))  # length grows evenly


@pytest.mark.parametrize("factor", [1.0, 2.0, -1.0, 0.0])
def test_spherical_of_parallel_latents_is_straight(factor):
    a = torch.tensor([[1.0, 2.0, -1.0]])
    z = between(a, factor * a, 5, spherical=True)
    assert torch.allclose(z, between(a, factor * a, 5), atol=1e-5)


@pytest.mark.parametrize("spherical", [False, True])
@pytest.mark.parametrize("steps", [0, 10])
def test_the_ends_are_the_reconstructions(learned_folder, spherical, steps):
    run = dualmcmc.load(learned_folder, "cpu", overrides=[f"teaching.z_chain.steps={steps}"])
    x = from_uint8(images_for(run, None).store.first(6))
    found = interpolate(run, *inferred_pairs(run, x), 5, spherical)
    rebuilt = run.reconstruct(x, rng=run.stream("z-chain"))
    assert torch.allclose(found.images[:, 0], rebuilt[::2], atol=1e-5)
    assert torch.allclose(found.images[:, -1], rebuilt[1::2], atol=1e-5)


def test_numbers_and_picture(learned):
    a, b = prior_pairs(learned, 3)
    assert not torch.equal(a, b)
    found = interpolate(learned, *prior_pairs(learned, 3), points=6)
    assert found.images.shape == (3, 6, 1, 8, 8)
    steps = (found.images[:, 1:] - found.images[:, :-1]).square().mean((2, 3, 4)).sqrt()
    assert found.numbers["step_mean"] == pytest.approx(float(steps.mean()))
    assert found.numbers["step_largest"] == pytest.approx(float(steps.max()))
    assert found.numbers["unevenness"] >= 1
    assert len(found.numbers["energy"]) == 6
    still = interpolate(learned, learned.prior(2), learned.prior(2) * 0 + learned.prior(1), points=2)
    assert still.numbers["unevenness"] == pytest.approx(1)
    assert picture(found).shape[2] == picture(found, found).shape[2]
    assert picture(found, found).shape[1] > 2 * picture(found).shape[1]
    with pytest.raises(UserError, match="--points"):
        interpolate(learned, *prior_pairs(learned, 1), points=1)
    with pytest.raises(UserError, match="needs two"):
        inferred_pairs(learned, torch.zeros(1, 1, 8, 8))
