"""An energy with an entropy-regularised generator against the equations of VERA (Grathwohl et al., 2021)."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal
from torch.testing import assert_close

from dualmcmc.config import Teaching
from dualmcmc.methods.no_mcmc import log_density_gradient, no_mcmc
from dualmcmc.nets import Trio
from tests.methods.plain import (
    PAPER,
    LinearGenerator,
    QuadraticEnergy,
    assert_descends,
    assert_mean,
    dependencies,
    flat,
    gradients,
    log_likelihood,
    log_prior,
    make_batch,
    make_trio,
    normal,
    seeded,
)

VERA = replace(PAPER, entropy_samples=7, entropy_spread=0.3, entropy_weight=0.6)
LINEAR = Teaching(latent_dim=2, sigma=0.5, entropy_samples=100, entropy_spread=1.2)  # wider than p(z|x)


def plain_score(generator, x, z, rng):
    """The gradient of log p(x) as the mean of that of log p(x|z') over p(z'|x), by importance sampling."""
    weights, scores = [], []
    for _ in range(VERA.entropy_samples):
        proposal = z + VERA.entropy_spread * normal(z, rng)
        point = x.detach().requires_grad_()
        log_joint = log_likelihood(generator, point, proposal) + log_prior(proposal)
        log_proposal = Independent(Normal(z, VERA.entropy_spread), 1).log_prob(proposal)
        weights.append((log_joint - log_proposal).exp().detach())
        scores.append(torch.autograd.grad(log_joint.sum(), point)[0])
    return sum(w[:, None] * s for w, s in zip(weights, scores, strict=True)) / sum(weights)[:, None]


def test_gradients_are_those_of_the_paper():
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = no_mcmc(trio, x, z, seeded(3), VERA)
    rng = seeded(3)
    x_hat = trio.generator(z)
    x_sample = x_hat + VERA.sigma * normal(x_hat, rng)
    f, f_sample = -trio.energy(x), -trio.energy(x_sample)
    assert_descends(losses.energy, f.mean() - f_sample.mean(), trio.energy)
    score = plain_score(trio.generator, x_sample.detach(), z, rng)
    # The entropy is -E log p(x), and its gradient that of -score^T x_sample.
    objective = f_sample.mean() - VERA.entropy_weight * (score * x_sample).sum(1).mean()
    assert_descends(losses.generator, objective, trio.generator)
    assert_close(losses.stats["energy_gap"], f.mean() - f_sample.mean())


def test_each_loss_depends_on_its_own_network_only():
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = no_mcmc(trio, x, z, None, VERA)
    assert dependencies(losses.energy, trio) == {"energy"}
    assert dependencies(losses.generator, trio) == {"generator"}
    assert losses.inference is losses.autoencoder is None


def test_generator_descends_the_energy_as_it_was():
    """Its update may follow the energy's."""
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = no_mcmc(trio, x, z, seeded(3), VERA)
    expected = gradients(losses.generator, trio.generator)
    with torch.no_grad():
        for parameter in trio.energy.parameters():
            parameter.mul_(-2)
    assert_close(gradients(losses.generator, trio.generator), expected)


def linear_generator():
    generator = LinearGenerator(3, 2)
    with torch.no_grad():
        generator.a.mul_(0.7)
    return generator


def test_score_is_exact_for_a_linear_generator():
    generator, rng = linear_generator(), seeded(0)
    z = normal(torch.empty(20, 2), rng)
    x = generator(z).detach() + LINEAR.sigma * normal(torch.empty(20, 3), rng)
    draws = torch.stack([log_density_gradient(generator, x, z, LINEAR, rng) for _ in range(200)])
    with torch.no_grad():
        exact = -(x - generator.b) @ torch.linalg.inv(generator.covariance(LINEAR.sigma))
    error = draws.std(0) / 200**0.5
    assert error.max() < 0.06
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_generator_gradient_is_exact_for_a_linear_generator(weight):
    """In expectation, that of E[E(x)] - weight * entropy: with weight 1, of KL(p || pi)."""
    trio, rng, cfg = Trio(QuadraticEnergy(3), linear_generator()), seeded(0), replace(LINEAR, entropy_weight=weight)
    energy, generator = trio.energy, trio.generator
    covariance = generator.covariance(cfg.sigma)
    precision = energy.factor @ energy.factor.T
    offset = generator.b - energy.c
    mean_energy = (torch.trace(precision @ covariance) + offset @ precision @ offset) / 2
    entropy = MultivariateNormal(generator.b, covariance).entropy()
    exact = flat(gradients(mean_energy - weight * entropy, generator))

    draws = []
    for _ in range(40):
        z = normal(torch.empty(1000, 2), rng)
        draws.append(flat(gradients(no_mcmc(trio, z @ generator.a.T.detach(), z, rng, cfg).generator, generator)))
    assert_mean(torch.stack(draws), exact)
