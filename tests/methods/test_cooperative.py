"""Cooperative learning against the equations of CoopNets (Xie et al., 2020)."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from dualmcmc.config import Chain
from dualmcmc.methods.cooperative import cooperative
from tests.methods.plain import (
    PAPER,
    assert_descends,
    dependencies,
    log_likelihood,
    make_batch,
    make_trio,
    normal,
    seeded,
    x_chain,
    z_chain,
)


def samples(trio, z, seed, start_noise=0.0):
    """Samples initialised by the generator and revised by the energy; their latents, revised on the posterior."""
    rng = seeded(seed)
    x_start = trio.generator(z).detach()
    if start_noise:
        x_start = x_start + start_noise * normal(x_start, rng)
    x_rev = x_chain(trio.energy, x_start, rng)
    return x_start, x_rev, z_chain(trio.generator, z, x_rev, rng)


@pytest.mark.parametrize("start_noise", [0.0, 0.4])
def test_gradients_are_those_of_the_paper(start_noise):
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = cooperative(trio, x, z, seeded(3), replace(PAPER, start_noise=start_noise))
    x_start, x_rev, z_rev = samples(trio, z, 3, start_noise)
    f, f_rev = -trio.energy(x), -trio.energy(x_rev)
    assert_descends(losses.energy, f.mean() - f_rev.mean(), trio.energy)
    assert_descends(losses.generator, log_likelihood(trio.generator, x_rev, z_rev).mean(), trio.generator)
    assert_close(losses.stats["energy_gap"], f.mean() - f_rev.mean())
    assert_close(losses.stats["x_displacement_rms"], (x_rev - x_start).square().mean(1).sqrt().mean())
    assert_close(losses.stats["z_displacement_rms"], (z_rev - z).square().mean(1).sqrt().mean())


def test_each_loss_depends_on_its_own_network_only():
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = cooperative(trio, x, z, None, PAPER)
    assert dependencies(losses.energy, trio) == {"energy"}
    assert dependencies(losses.generator, trio) == {"generator"}
    assert losses.inference is losses.autoencoder is None


def test_without_a_z_chain_it_regresses_onto_the_generating_latents():
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    losses = cooperative(trio, x, z, seeded(3), replace(PAPER, z_chain=Chain(steps=0), generator_sample_weight=7))
    _, x_rev, _ = samples(trio, z, 3)
    assert_close(losses.generator, 7 * (x_rev - trio.generator(z)).square().sum(1).mean())


def test_the_data_weight_has_no_effect():
    trio, (x, z) = make_trio("energy", "generator"), make_batch()
    plain, weighted = (
        cooperative(trio, x, z, seeded(3), replace(PAPER, generator_data_weight=weight)) for weight in (None, 9)
    )
    assert torch.equal(plain.generator, weighted.generator)
