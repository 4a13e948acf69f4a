import random

import numpy as np
import torch

from dualmcmc import rng


def test_every_source_is_restored():
    source = rng.generator(3)
    rng.seed_globals(5)
    random.gauss(0, 1)
    np.random.standard_normal()
    saved = rng.capture(source)

    def draws():
        return (
            torch.rand(2, generator=source).tolist(), torch.rand(2).tolist(),
            random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(),
        )  # fmt: skip

    first = draws()
    assert draws() != first
    assert rng.restore(source, *saved)
    assert draws() == first


def test_another_kind_of_device_is_told():
    source = rng.generator(3)
    tensors, plain = rng.capture(source)
    assert not rng.restore(source, tensors, plain | {"device": "cuda"})


def test_derived_seeds_differ():
    seeds = [rng.derive(0), rng.derive(0, 1), rng.derive(1), rng.derive(1, 0), rng.derive(0, 0, 1)]
    assert len(set(seeds)) == len(seeds)
    assert rng.derive(7, 2, 3) == rng.derive(7, 2, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)
