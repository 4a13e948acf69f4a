"""A generator with short-run inference against the equations of Nijkamp et al. (2020)."""

from dataclasses import replace

from torch.testing import assert_close

from dualmcmc.config import Chain
from dualmcmc.methods.sr_abp import sr_abp
from tests.methods.plain import (
    PAPER,
    assert_descends,
    dependencies,
    log_likelihood,
    make_batch,
    make_trio,
    seeded,
    z_chain,
)


def test_gradient_is_that_of_the_paper():
    trio, (x, z) = make_trio("generator"), make_batch()
    losses = sr_abp(trio, x, z, seeded(3), PAPER)
    z_rev = z_chain(trio.generator, z, x, seeded(3))
    assert_descends(losses.generator, log_likelihood(trio.generator, x, z_rev).mean(), trio.generator)
    error = (x - trio.generator(z_rev)).square()
    assert_close(losses.generator, error.sum(1).mean() / (2 * PAPER.sigma**2))
    expected = {
        "reconstruction_mse": error.mean().detach(),
        "z_displacement_rms": (z_rev - z).square().mean(1).sqrt().mean(),
    }
    assert_close(losses.stats, expected)
    assert dependencies(losses.generator, trio) == {"generator"}
    assert losses.energy is losses.inference is losses.autoencoder is None


def test_chains_start_from_the_prior_draws():
    trio, (x, z) = make_trio("generator"), make_batch()
    cfg = replace(PAPER, z_chain=Chain(steps=0), generator_data_weight=7, generator_sample_weight=9)
    losses = sr_abp(trio, x, z, None, cfg)
    assert_close(losses.generator, 7 * (x - trio.generator(z)).square().sum(1).mean())
    assert losses.stats["z_displacement_rms"] == 0
