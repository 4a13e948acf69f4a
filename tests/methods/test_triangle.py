"""The divergence triangle against the equations of Han et al. (2019)."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import kl_divergence
from torch.testing import assert_close

from dualmcmc.methods.triangle import triangle
from dualmcmc.nets import Trio
from tests.methods.plain import (
    PAPER,
    B,
    LinearGenerator,
    LinearInference,
    QuadraticEnergy,
    X,
    assert_descends,
    assert_mean,
    dependencies,
    elbo,
    flat,
    gradients,
    log_likelihood,
    log_prior,
    make_batch,
    make_trio,
    normal,
    posterior,
    seeded,
)


@pytest.mark.parametrize("start_noise", [0.0, 0.4])
def test_gradients_are_those_of_the_paper(start_noise):
    trio, (x, z) = make_trio(), make_batch()
    losses = triangle(trio, x, z, seeded(3), replace(PAPER, start_noise=start_noise))
    rng = seeded(3)
    x_sample = trio.generator(z)
    if start_noise:
        x_sample = x_sample + start_noise * normal(x_sample, rng)
    f, f_sample = -trio.energy(x), -trio.energy(x_sample)
    assert_descends(losses.energy, f.mean() - f_sample.mean(), trio.energy)
    q_p = -elbo(trio.generator, trio.inference, x, rng).mean()  # KL(Q || P) without the data's entropy
    log_p = log_prior(z) + log_likelihood(trio.generator, x_sample, z)
    p_pi = (log_p - f_sample - posterior(trio.inference, x_sample).log_prob(z)).mean()  # without log Z
    assert_descends(losses.autoencoder, -(q_p + p_pi), trio.generator, trio.inference)
    assert_close(losses.stats["energy_gap"], f.mean() - f_sample.mean())


def test_losses_depend_on_their_own_networks_only():
    trio, (x, z) = make_trio(), make_batch()
    losses = triangle(trio, x, z, None, PAPER)
    assert dependencies(losses.energy, trio) == {"energy"}
    assert dependencies(losses.autoencoder, trio) == {"generator", "inference"}
    assert losses.generator is losses.inference is None
    losses.autoencoder.backward()
    assert all(p.grad is None and p.requires_grad for p in trio.energy.parameters())


def test_autoencoder_descends_the_energy_as_it_was():
    """Its update may follow the energy's."""
    trio, (x, z) = make_trio(), make_batch()
    losses = triangle(trio, x, z, seeded(3), PAPER)
    expected = gradients(losses.autoencoder, trio.generator)
    with torch.no_grad():
        for parameter in trio.energy.parameters():
            parameter.mul_(-2)
    assert_close(gradients(losses.autoencoder, trio.generator), expected)


def test_weights_scale_their_terms():
    trio, (x, z) = make_trio(), make_batch()
    losses = triangle(trio, x, z, seeded(3), replace(PAPER, generator_data_weight=7, latent_weight=3))
    mean, log_var = trio.inference(x)
    error = (x - trio.generator(mean + (log_var / 2).exp() * normal(mean, seeded(3)))).square().sum(1).mean()
    kl = (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean() / 2
    mean, log_var = trio.inference(trio.generator(z))
    nll = (log_var + (z - mean) ** 2 / log_var.exp()).sum(1).mean() / 2
    assert_close(losses.autoencoder, 7 * error + 3 * kl + trio.energy(trio.generator(z)).mean() + nll)
    assert_close(losses.stats["inference_sample_nll"], nll.detach())


def test_gradients_are_those_of_the_exact_divergences():
    """In expectation, for linear networks and Gaussian data, where Q, P and Pi are Gaussian."""
    trio = Trio(QuadraticEnergy(), LinearGenerator(), LinearInference())
    cfg = replace(PAPER, start_noise=PAPER.sigma)
    data_mean, mixing = torch.randn(X, dtype=torch.float64), torch.randn(X, X, dtype=torch.float64)

    q = trio.inference.joint(data_mean, mixing @ mixing.T)
    p = trio.generator.joint(cfg.sigma)
    pi = trio.inference.joint(trio.energy.c, trio.energy.covariance())
    q_p, p_pi, q_pi = kl_divergence(q, p), kl_divergence(p, pi), kl_divergence(q, pi)
    exact = {
        "energy": gradients(q_pi - p_pi, trio.energy),
        "generator": gradients(q_p + p_pi, trio.generator),
        "inference": gradients(q_p + p_pi, trio.inference),
    }

    rng, draws = seeded(0), {name: [] for name in exact}
    for _ in range(60):
        x = data_mean + normal(torch.empty(500 * B, X), rng) @ mixing.T
        z = normal(torch.empty(len(x), PAPER.latent_dim), rng)
        losses = triangle(trio, x, z, rng, cfg)
        for name, found in draws.items():
            loss = losses.energy if name == "energy" else losses.autoencoder
            found.append(flat(gradients(loss, trio.get_submodule(name))))
    for name, found in draws.items():
        assert_mean(torch.stack(found), flat(exact[name]))
