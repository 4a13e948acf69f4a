"""Short chains from noise against the equations of Nijkamp et al. (2019)."""

from dataclasses import replace

import torch
from torch.testing import assert_close

from dualmcmc.config import Chain
from dualmcmc.methods.short_run import short_run
from tests.methods.plain import PAPER, assert_descends, dependencies, make_batch, make_trio, seeded, x_chain


def uniform(x, rng):
    return torch.rand(x.shape, dtype=torch.float64, generator=rng) * 2 - 1


def test_gradients_are_those_of_the_paper():
    trio, (x, z) = make_trio("energy"), make_batch()
    losses = short_run(trio, x, z, seeded(3), PAPER)
    rng = seeded(3)
    x_start = uniform(x, rng)
    x_rev = x_chain(trio.energy, x_start, rng)
    f, f_rev = -trio.energy(x), -trio.energy(x_rev)
    assert_descends(losses.energy, f.mean() - f_rev.mean(), trio.energy)
    assert_close(losses.stats["energy_gap"], f.mean() - f_rev.mean())
    assert_close(losses.stats["x_displacement_rms"], (x_rev - x_start).square().mean(1).sqrt().mean())
    assert dependencies(losses.energy, trio) == {"energy"}
    assert losses.generator is losses.inference is losses.autoencoder is None


def test_chain_starts_from_uniform_noise_and_not_from_z():
    trio, (x, z) = make_trio("energy"), make_batch()
    no_steps = replace(PAPER, x_chain=Chain(steps=0), start_noise=0.4)
    losses = short_run(trio, x, z, seeded(3), no_steps)
    assert_close(losses.energy, trio.energy(x).mean() - trio.energy(uniform(x, seeded(3))).mean())
    assert torch.equal(short_run(trio, x, z, seeded(3), PAPER).energy, short_run(trio, x, -z, seeded(3), PAPER).energy)


def test_noise_covers_the_range_of_images():
    seen = []
    trio = make_trio("energy")
    trio.energy.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    x = torch.zeros(4000, 5, dtype=torch.float64)
    short_run(trio, x, None, seeded(0), PAPER)
    start = seen[0]
    assert start.min() > -1
    assert start.max() < 1
    assert start.mean().abs() < 0.02
    assert abs(start.var() - 1 / 3) < 0.01
