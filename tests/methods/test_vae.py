"""The variational autoencoder against the evidence lower bound of Kingma and Welling (2014)."""

from dataclasses import replace

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from dualmcmc.methods.vae import vae
from dualmcmc.nets import Trio
from tests.methods.plain import (
    PAPER,
    LinearGenerator,
    LinearInference,
    assert_descends,
    assert_mean,
    dependencies,
    elbo,
    flat,
    gradients,
    make_batch,
    make_trio,
    normal,
    seeded,
)


def test_gradients_are_those_of_the_paper():
    trio, (x, z) = make_trio("generator", "inference"), make_batch()
    losses = vae(trio, x, z, seeded(3), PAPER)
    bound = elbo(trio.generator, trio.inference, x, seeded(3)).mean()
    assert_descends(losses.autoencoder, bound, trio.generator, trio.inference)
    assert dependencies(losses.autoencoder, trio) == {"generator", "inference"}
    assert losses.energy is losses.generator is losses.inference is None


def test_weights_scale_their_terms():
    trio, (x, z) = make_trio("generator", "inference"), make_batch()

    def losses(**changes):
        return vae(trio, x, z, seeded(3), replace(PAPER, **changes))

    mean, log_var = trio.inference(x)
    error = (x - trio.generator(mean + (log_var / 2).exp() * normal(mean, seeded(3)))).square().sum(1).mean()
    kl = (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean() / 2
    assert_close(losses().autoencoder, error / (2 * PAPER.sigma**2) + kl)
    assert_close(losses(generator_data_weight=7, latent_weight=3).autoencoder, 7 * error + 3 * kl)
    assert_close(losses(generator_sample_weight=7).autoencoder, losses().autoencoder)
    assert_close(losses().stats, {"reconstruction_mse": error.detach() / x.shape[1], "inference_kl": kl.detach()})


def test_gradient_is_that_of_the_exact_bound():
    """In expectation, for a linear generator, where the bound has a closed form."""
    trio, (x, z) = Trio(None, LinearGenerator(), LinearInference()), make_batch()
    mean, log_var = trio.inference(x)
    a = trio.generator.a
    error = (x - trio.generator(mean)).square().sum(1).mean() + torch.trace(a @ log_var[0].exp().diag() @ a.T)
    kl = (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean() / 2
    bound = -error / (2 * PAPER.sigma**2) - kl

    many, rng = x.repeat(500, 1), seeded(0)
    for net in (trio.generator, trio.inference):
        draws = [flat(gradients(vae(trio, many, z, rng, PAPER).autoencoder, net)) for _ in range(40)]
        assert_mean(torch.stack(draws), -flat(gradients(bound, net)))


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_bound_is_tight_for_the_true_posterior_only(shift):
    generator, inference, (x, z) = LinearGenerator(), LinearInference(), make_batch()
    with torch.no_grad():
        generator.a.copy_(torch.linalg.qr(generator.a).Q)  # orthogonal columns: the posterior's factors are independent
        precision = 1 + 1 / PAPER.sigma**2
        inference.m.copy_(generator.a.T / PAPER.sigma**2 / precision)
        inference.c.copy_(-inference.m @ generator.b + shift)
        inference.log_var.fill_(-torch.tensor(precision).log())
        loss = vae(Trio(None, generator, inference), x.repeat(20_000, 1), z, seeded(0), PAPER).autoencoder
        constant = x.shape[1] / 2 * (2 * torch.pi * torch.tensor(PAPER.sigma**2)).log()
        evidence = MultivariateNormal(generator.b, generator.covariance(PAPER.sigma)).log_prob(x).mean()
    gap = shift**2 * precision * 3 / 2  # KL(q || posterior)
    assert evidence.item() + loss.item() + constant.item() == pytest.approx(gap, abs=0.03 + 0.02 * gap)
