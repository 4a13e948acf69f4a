from dataclasses import replace

import pytest
import torch

from dualmcmc.methods.improved_cd import improved_cd, nearest_neighbour_entropy
from dualmcmc.methods.memory import Memory
from dualmcmc.methods.persistent import persistent
from tests.methods.plain import PAPER, B, X, gradients, make_batch, make_trio, normal, seeded, x_chain
from tests.methods.test_persistent import draw_starts


def make_memory(samples):
    return Memory({"samples": samples.clone()}, torch.arange(B))


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_gradient(weight):
    """That of contrastive divergence, and of E(x~) - log |x~ - nearest| through the last step, with E itself fixed."""
    trio, (x, z) = make_trio("energy"), make_batch()
    energy, cfg = trio.energy, replace(PAPER, divergence_weight=weight)
    samples = torch.randn(20, X, dtype=torch.float64)
    losses = improved_cd(trio, x, z, seeded(2), cfg, make_memory(samples))

    rng, step = seeded(2), cfg.x_chain.step_size
    _, start, _ = draw_starts(samples, rng, cfg.restart_probability)
    before = x_chain(energy, start, rng, replace(cfg.x_chain, steps=cfg.x_chain.steps - 1))
    noise = (2 * step) ** 0.5 * normal(before, rng)
    parameters = dict(energy.named_parameters())
    fixed = {name: value.detach().clone() for name, value in parameters.items()}

    def divergence(trained):
        point = before.clone().requires_grad_()
        values = torch.func.functional_call(energy, trained, point)
        (slope,) = torch.autograd.grad(values.sum(), point, create_graph=True)
        x_rev = before - step * slope + noise
        distances = torch.stack([torch.stack([(one - other).norm() for other in samples]) for one in x_rev])
        return torch.func.functional_call(energy, fixed, x_rev).mean() - distances.amin(1).log().mean(), x_rev

    value, x_rev = divergence(parameters)
    x_rev = x_rev.detach()
    assert torch.allclose(losses.stats["sampler_divergence"], value)
    through_step = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    contrast = gradients(energy(x).mean() - energy(x_rev).mean(), energy)
    for found, direct, indirect in zip(gradients(losses.energy, energy), contrast, through_step, strict=True):
        assert indirect.abs().max() > 1e-4
        torch.testing.assert_close(found, direct + weight * indirect, rtol=1e-6, atol=1e-10)


def test_chain_is_that_of_persistent():
    trio, (x, z), samples = make_trio("energy"), make_batch(), torch.randn(20, X, dtype=torch.float64)
    ours, theirs = make_memory(samples), make_memory(samples)
    improved_cd(trio, x, z, seeded(2), PAPER, ours)
    persistent(trio, x, z, seeded(2), PAPER, theirs)
    torch.testing.assert_close(ours["samples"], theirs["samples"])


def test_slope_is_that_of_every_step():
    trio, (x, z), cfg = make_trio("energy"), make_batch(), replace(PAPER, x_chain=replace(PAPER.x_chain, steps=1))
    samples = torch.randn(20, X, dtype=torch.float64)
    stats = improved_cd(trio, x, z, seeded(2), cfg, make_memory(samples)).stats
    _, start, _ = draw_starts(samples, seeded(2), cfg.restart_probability)
    start.requires_grad_()
    (slope,) = torch.autograd.grad(trio.energy(start).sum(), start)
    torch.testing.assert_close(stats["energy_slope"], slope.norm(dim=1).mean())


def test_entropy_grows_with_the_spread_of_the_samples():
    x = torch.randn(50, 4, dtype=torch.float64)
    one, two = (nearest_neighbour_entropy(scale * x, scale * x) for scale in (1, 2))
    assert torch.allclose(two - one, torch.tensor(2.0, dtype=torch.float64).log())
