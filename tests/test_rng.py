import random

import numpy as np
import pytest
import torch

from dualmcmc import rng
from dualmcmc.utils.errors import UserError


def test_all_sources_are_restored():
    generator = rng.make_generator(3)
    rng.seed_globals(5)
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = rng.capture(generator)

    def draw():
        return (
            torch.rand(2, generator=generator).tolist(), torch.rand(2).tolist(),
            random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(),
        )  # fmt: skip

    first = draw()
    assert draw() != first
    assert rng.restore(generator, *saved)
    assert draw() == first


def test_restore_on_another_type_of_device():
    generator = rng.make_generator(3)
    tensors, plain = rng.capture(generator)
    assert not rng.restore(generator, tensors, plain | {"device": "cuda"})


def test_derived_seeds_differ():
    paths = [(0,), (0, 1), (1,), (1, 0), (0, 0, 1)]
    seeds = [rng.derive_seed(*path) for path in paths]
    assert len(set(seeds)) == len(seeds)
    assert rng.derive_seed(7, 2, 3) == rng.derive_seed(7, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
    with pytest.raises(UserError, match="at least 0, not -1"):
        rng.derive_seed(-1)


def test_ranks_share_what_one_process_draws():
    like = torch.zeros(())
    whole = rng.randn((6, 2), like, rng.make_generator(3))
    parts = [rng.randn((3, 2), like, rng.SharedGenerator(rng.make_generator(3), rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)
