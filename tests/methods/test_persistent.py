from dataclasses import replace

import torch

from dualmcmc.methods.memory import Memory
from dualmcmc.methods.persistent import initial_memory, persistent
from tests.methods.plain import PAPER, B, X, assert_descends, make_batch, make_trio, seeded, x_chain


def draw_starts(samples, rng, restart):
    """Where the chains start: rows of the buffer, and some noise."""
    rows = torch.randint(0, len(samples), (B,), generator=rng)
    restarted = torch.rand(B, dtype=torch.float64, generator=rng) < restart
    noise = 2 * torch.rand(B, X, dtype=torch.float64, generator=rng) - 1
    return rows, torch.where(restarted[:, None], noise, samples[rows]), restarted


def test_loss_and_buffer():
    """E(x) - E(x~), where x~ continues a chain of the buffer or starts from noise, and replaces its row."""
    trio, (x, z) = make_trio("energy"), make_batch()
    cfg = replace(PAPER, restart_probability=0.5)
    samples = 3 * torch.randn(20, X, dtype=torch.float64)
    memory = Memory({"samples": samples.clone()}, torch.arange(B))
    losses = persistent(trio, x, z, seeded(2), cfg, memory)
    rng = seeded(2)
    rows, start, restarted = draw_starts(samples, rng, 0.5)
    assert 0 < restarted.sum() < B
    x_rev = x_chain(trio.energy, start, rng)
    assert_descends(losses.energy, -trio.energy(x).mean() + trio.energy(x_rev).mean(), trio.energy)
    expected = samples.clone()
    for row, value in zip(rows.tolist(), x_rev, strict=True):
        expected[row] = value
    assert torch.allclose(memory["samples"], expected)
    assert not torch.equal(memory["samples"], samples)


def test_next_iteration_continues_the_chains():
    trio, (x, z) = make_trio("energy"), make_batch()
    cfg = replace(PAPER, restart_probability=0.0, buffer_size=1)
    memory = Memory({"samples": torch.zeros(1, X, dtype=torch.float64)}, torch.arange(B))
    persistent(trio, x, z, seeded(0), cfg, memory)
    kept = memory["samples"].clone()
    losses = persistent(trio, x, z, seeded(1), cfg, memory)
    rng = seeded(1)
    draw_starts(kept, rng, 0.0)
    x_rev = x_chain(trio.energy, kept.expand(B, X), rng)
    assert torch.allclose(losses.energy, trio.energy(x).mean() - trio.energy(x_rev).mean())


def test_buffer_starts_as_uniform_noise():
    samples = initial_memory(replace(PAPER, buffer_size=4000), (3, 2, 2), 7, seeded(0))["samples"]
    assert samples.shape == (4000, 3, 2, 2)
    assert samples.abs().max() <= 1
    assert abs(float(samples.mean())) < 0.02
    assert abs(float(samples.var()) - 1 / 3) < 0.01
