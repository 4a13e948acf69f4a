import torch

from dualmcmc.methods.abp import abp, initial_memory
from dualmcmc.methods.memory import Memory
from tests.methods.plain import (
    PAPER,
    B,
    D,
    assert_descends,
    log_likelihood,
    make_batch,
    make_trio,
    seeded,
    z_chain,
)  # fmt: skip


def test_chains_continue_with_those_of_the_same_images():
    trio, (x, z) = make_trio("generator"), make_batch()
    latents = torch.randn(30, D, dtype=torch.float64)
    memory = Memory({"latents": latents.clone()}, torch.tensor([7, 3, 29, 0, 11, 5]))
    losses = abp(trio, x, z, seeded(4), PAPER, memory)
    z_rev = z_chain(trio.generator, latents[memory.indices], x, seeded(4))
    assert_descends(losses.generator, log_likelihood(trio.generator, x, z_rev).mean(), trio.generator)
    expected = latents.clone()
    expected[memory.indices] = z_rev
    torch.testing.assert_close(memory["latents"], expected)
    assert (expected != latents).any(1).sum() == B


def test_latents_start_as_prior_draws():
    latents = initial_memory(PAPER, (3, 8, 8), 5000, seeded(0))["latents"]
    assert latents.shape == (5000, D)
    assert latents.mean(0).abs().max() < 0.06
    assert (latents.std(0) - 1).abs().max() < 0.04
