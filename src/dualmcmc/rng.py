"""Random sources: seeded, saved and restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualmcmc.utils.errors import UserError

SavedStates = tuple[dict[str, Tensor], dict[str, Any]]
GlobalStates = tuple[Tensor, list[Tensor], Any, Any]


class Stream(IntEnum):
    """Independent random streams, one per purpose. Their numbers fix every seed: never renumber."""

    GLOBALS = 0  # torch's, Python's and NumPy's global sources
    METHOD = 1  # prior draws and chain noise in training
    ORDER = 2  # the order of the data
    PREVIEW = 3  # sample grids during training
    USE = 4  # a trained run
    FLIPS = 5  # which images are mirrored
    MASKS = 6  # inpainting masks
    MEMORY = 7  # initial states of persistent chains


def derive_seed(seed: int, *path: int) -> int:
    """A seed for the purpose `path`, independent of those for other purposes."""
    if seed < 0:
        raise UserError(f"a seed must be at least 0, not {seed}.")
    return int(np.random.SeedSequence(seed, spawn_key=path).generate_state(1, np.uint64)[0] >> 1)


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seeded torch.Generator on a device."""
    return torch.Generator(device=device).manual_seed(seed)


class SharedGenerator(NamedTuple):
    """One rank's slice, along the first axis, of what all ranks draw together.

    Every rank draws the whole batch and keeps its own part, so the number of processes does not change a run.
    """

    generator: torch.Generator
    rank: int
    world_size: int


RandomSource = torch.Generator | SharedGenerator | None  # None: torch's global generator


def randn(shape: Sequence[int], like: Tensor, rng: RandomSource) -> Tensor:
    """Standard normal noise with the dtype and device of `like`."""
    return _draw(partial(torch.randn, dtype=like.dtype, device=like.device), shape, rng)


def randn_like(tensor: Tensor, rng: RandomSource) -> Tensor:
    """Standard normal noise with the shape, dtype and device of `tensor`."""
    return randn(tensor.shape, tensor, rng)


def rand(shape: Sequence[int], like: Tensor, rng: RandomSource) -> Tensor:
    """Uniform numbers in [0, 1) with the dtype and device of `like`."""
    return _draw(partial(torch.rand, dtype=like.dtype, device=like.device), shape, rng)


def uniform_like(tensor: Tensor, rng: RandomSource) -> Tensor:
    """Noise uniform on [-1, 1], where x-chains start without a generator, with the shape and device of `tensor`."""
    return 2 * rand(tensor.shape, tensor, rng) - 1


def randint(shape: Sequence[int], high: int, like: Tensor, rng: RandomSource) -> Tensor:
    """Uniform integers in [0, high) on the device of `like`."""
    return _draw(partial(torch.randint, high, device=like.device), shape, rng)


def _draw(sampler: Callable[..., Tensor], shape: Sequence[int], rng: RandomSource) -> Tensor:
    if not isinstance(rng, SharedGenerator):
        return sampler(shape, generator=rng)
    local, *rest = shape
    return sampler((rng.world_size * local, *rest), generator=rng.generator)[rng.rank * local :][:local]


def seed_globals(seed: int) -> None:
    """Seed the global sources. The package does not draw from them, but a user's module may (dropout)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def global_states() -> GlobalStates:
    """The states of torch's, Python's and NumPy's global sources, for `set_global_states`."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus, random.getstate(), np.random.get_state()


def set_global_states(states: GlobalStates) -> None:
    """Return to these states."""
    torch_state, on_gpus, python_state, numpy_state = states
    torch.set_rng_state(torch_state)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)
    random.setstate(python_state)
    np.random.set_state(numpy_state)


@contextmanager
def preserved() -> Iterator[None]:
    """Leave the global sources as they were."""
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)


def capture(method_rng: torch.Generator) -> SavedStates:
    """The states of the method's generator and of all global sources: tensors, and plain values."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    tensors = {
        "method": method_rng.get_state(),
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
    }
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    plain = {
        "device": method_rng.device.type,
        "python": [version, gauss],
        "numpy": [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]],
    }
    return tensors, plain


def restore(method_rng: torch.Generator, tensors: dict[str, Tensor], plain: dict[str, Any]) -> bool:
    """Restore all sources; False if the device type changed, in which case the method's generator keeps its state."""
    version, gauss = plain["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    position, has_gauss, cached = plain["numpy"]
    key = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(
        {"bit_generator": "MT19937", "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": cached}
    )
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    if plain["device"] != method_rng.device.type:
        return False
    method_rng.set_state(tensors["method"])
    return True
