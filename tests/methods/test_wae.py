"""The Wasserstein autoencoder against the equations of Tolstikhin et al. (2018)."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from dualmcmc.methods.wae import SCALES, maximum_mean_discrepancy, wae
from tests.methods.plain import PAPER, dependencies, make_batch, make_trio, normal, seeded


def plain_mmd(a, b):
    """Algorithm 2 of the paper, with its kernel for images k(u, v) = C / (C + |u - v|^2), C = 2 d scale."""

    def kernel(u, v):
        widths = [2 * len(u) * scale for scale in (0.1, 0.2, 0.5, 1, 2, 5, 10)]
        return sum(c / (c + (u - v).dot(u - v)) for c in widths)

    n = len(a)
    within = sum(kernel(u[i], u[j]) for u in (a, b) for i in range(n) for j in range(n) if i != j)
    between = sum(kernel(a[i], b[j]) for i in range(n) for j in range(n))
    return within / (n * (n - 1)) - 2 * between / n**2


def test_loss_is_that_of_the_paper():
    trio, (x, z) = make_trio("generator", "inference"), make_batch()
    losses = wae(trio, x, z, None, replace(PAPER, generator_data_weight=1, latent_weight=10))
    latents, _ = trio.inference(x)
    error, discrepancy = (x - trio.generator(latents)).square().sum(1).mean(), plain_mmd(latents, z)
    assert discrepancy.abs() > 0.01
    assert_close(losses.autoencoder, error + 10 * discrepancy)
    assert_close(wae(trio, x, z, None, PAPER).autoencoder, error / (2 * PAPER.sigma**2) + discrepancy)
    assert_close(losses.stats, {"reconstruction_mse": error.detach() / x.shape[1], "latent_mmd": discrepancy.detach()})
    for net in (trio.generator, trio.inference.mean):
        found, expected = (
            torch.autograd.grad(value, list(net.parameters()), retain_graph=True)
            for value in (losses.autoencoder, error + 10 * discrepancy)
        )
        assert_close(found, expected)


def test_loss_depends_on_generator_and_encoder_mean_only():
    trio, (x, z) = make_trio("generator", "inference"), make_batch()
    losses = wae(trio, x, z, None, PAPER)
    assert dependencies(losses.autoencoder, trio) == {"generator", "inference"}
    unused = torch.autograd.grad(losses.autoencoder, list(trio.inference.log_var.parameters()))
    assert all((gradient == 0).all() for gradient in unused)
    assert losses.energy is losses.generator is losses.inference is None


def test_discrepancy_of_samples_of_one_distribution_is_zero_on_average():
    rng, like = seeded(0), torch.empty(50, 3)
    draws = torch.stack([maximum_mean_discrepancy(normal(like, rng), normal(like, rng)) for _ in range(200)])
    assert draws.mean().abs() < 4 * draws.std() / 200**0.5
    assert draws.std() < 0.01 * len(SCALES)


@pytest.mark.parametrize("change", [lambda u: u + 0.5, lambda u: 2 * u, lambda u: u * torch.tensor([1, 1, 0.0])])
def test_discrepancy_of_different_distributions_is_positive(change):
    rng, like = seeded(0), torch.empty(500, 3)
    a, b = normal(like, rng), normal(like, rng)
    different = maximum_mean_discrepancy(change(a), b)
    assert different > 0.05
    assert different > 10 * maximum_mean_discrepancy(a, b).abs()
