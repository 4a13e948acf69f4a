from dataclasses import replace

import torch

from dualmcmc.methods.memory import Memory
from dualmcmc.methods.rae import MOMENTUM, fitted_prior, initial_memory, rae
from dualmcmc.nets import Prior
from tests.methods.plain import PAPER, B, D, make_batch, make_trio


def make_memory():
    return Memory({name: value.double() for name, value in initial_memory(PAPER, (), 0, None).items()}, torch.arange(B))


def test_loss():
    trio, (x, z) = make_trio("generator", "inference"), make_batch()
    memory = make_memory()
    losses = rae(trio, x, z, None, replace(PAPER, latent_weight=0.6), memory)
    loss = losses.autoencoder
    latents = trio.inference.mean(x)
    error, size = (x - trio.generator(latents)).pow(2).sum(1), latents.pow(2).sum(1)
    assert torch.allclose(loss, (error / (2 * PAPER.sigma**2) + 0.6 * size / 2).mean())
    assert torch.allclose(losses.stats["latent_norm"], size.sqrt().mean())
    moved = {"mean": latents.mean(0), "second_moment": latents.T @ latents / B}
    for name, value in make_memory().tensors.items():
        assert torch.allclose(memory[name], (1 - MOMENTUM) * value + MOMENTUM * moved[name])


def test_fitted_prior_has_the_moments_of_the_latents():
    mix = torch.randn(D, D, dtype=torch.float64)
    mean, covariance = torch.randn(D, dtype=torch.float64), mix @ mix.T
    prior = Prior(*fitted_prior({"mean": mean, "second_moment": covariance + torch.outer(mean, mean)}))
    torch.testing.assert_close((prior.scale @ prior.scale.T).double(), covariance, rtol=1e-4, atol=1e-5)
    draws = prior.transform(torch.randn(100_000, D, generator=torch.Generator().manual_seed(0))).double()
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.03)
    torch.testing.assert_close(draws.T.cov(), covariance, rtol=0.03, atol=0.03)


def test_prior_of_collapsed_latents_is_finite():
    scale = fitted_prior({"mean": torch.ones(D), "second_moment": torch.ones(D, D)})[1]
    assert scale.isfinite().all()
