"""Variational MCMC teaching against the equations of Xie, Zheng and Li (2021)."""

from dataclasses import replace

import pytest
from torch.testing import assert_close

from dualmcmc.methods.amortized import amortized
from tests.methods.plain import (
    PAPER,
    assert_descends,
    dependencies,
    elbo,
    make_batch,
    make_trio,
    normal,
    seeded,
    x_chain,
)


def revise(trio, z, rng, start_noise=0.0):
    """Samples of the generator, revised by the energy."""
    x_start = trio.generator(z).detach()
    if start_noise:
        x_start = x_start + start_noise * normal(x_start, rng)
    return x_start, x_chain(trio.energy, x_start, rng)


@pytest.mark.parametrize("start_noise", [0.0, 0.4])
def test_gradients_are_those_of_the_paper(start_noise):
    trio, (x, z) = make_trio(), make_batch()
    losses = amortized(trio, x, z, seeded(3), replace(PAPER, start_noise=start_noise))
    rng = seeded(3)
    x_start, x_rev = revise(trio, z, rng, start_noise)
    f, f_rev = -trio.energy(x), -trio.energy(x_rev)
    assert_descends(losses.energy, f.mean() - f_rev.mean(), trio.energy)
    bound = elbo(trio.generator, trio.inference, x_rev, rng).mean()
    assert_descends(losses.autoencoder, bound, trio.generator, trio.inference)
    assert_close(losses.stats["energy_gap"], f.mean() - f_rev.mean())
    assert_close(losses.stats["x_displacement_rms"], (x_rev - x_start).square().mean(1).sqrt().mean())


def test_losses_depend_on_their_own_networks_only():
    trio, (x, z) = make_trio(), make_batch()
    losses = amortized(trio, x, z, None, PAPER)
    assert dependencies(losses.energy, trio) == {"energy"}
    assert dependencies(losses.autoencoder, trio) == {"generator", "inference"}
    assert losses.generator is losses.inference is None


def test_weights_scale_their_terms():
    trio, (x, z) = make_trio(), make_batch()

    def loss(**changes):
        return amortized(trio, x, z, seeded(3), replace(PAPER, **changes)).autoencoder

    rng = seeded(3)
    _, x_rev = revise(trio, z, rng)
    mean, log_var = trio.inference(x_rev)
    error = (x_rev - trio.generator(mean + (log_var / 2).exp() * normal(mean, rng))).square().sum(1).mean()
    kl = (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean() / 2
    assert_close(loss(), error / (2 * PAPER.sigma**2) + kl)
    assert_close(loss(generator_sample_weight=7, latent_weight=3), 7 * error + 3 * kl)
    assert_close(loss(generator_data_weight=7), loss())
