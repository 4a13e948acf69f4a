"""Random numbers of every kind: seeded, saved, restored."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualmcmc.errors import UserError

Saved = tuple[dict[str, Tensor], dict[str, Any]]


class Stream(IntEnum):
    """What a run draws random numbers for, each from a stream of its own."""

    GLOBALS = 0  # torch's, Python's and NumPy's own sources
    METHOD = 1  # prior draws and the chains' noise, in training
    ORDER = 2  # the order of the data
    PREVIEW = 3  # pictures of a run in the making
    USE = 4  # a trained run
    FLIPS = 5  # which images are mirrored
    MASKS = 6  # what is hidden from an inpainting


def derive(seed: int, *path: int) -> int:
    """A seed for one purpose (`path`), independent of those for others."""
    if seed < 0:
        raise UserError(f"a seed must be at least 0, not {seed}.")
    return int(np.random.SeedSequence(seed, spawn_key=path).generate_state(1, np.uint64)[0] >> 1)


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seeded source of random numbers on a device."""
    return torch.Generator(device=device).manual_seed(seed)


class Share(NamedTuple):
    """One process's part of what `world` of them draw together, along the first axis.

    Each draws the whole and keeps its own, so their number changes nothing in a run.
    """

    whole: torch.Generator
    rank: int
    world: int


Source = torch.Generator | Share | None  # of random numbers; None: torch's own


def gaussian(shape: Sequence[int], like: Tensor, rng: Source) -> Tensor:
    """N(0, I) noise of a shape, in the type and place of `like`."""
    return _drawn(partial(torch.randn, dtype=like.dtype, device=like.device), shape, rng)


def integers(shape: Sequence[int], below: int, like: Tensor, rng: Source) -> Tensor:
    """Whole numbers from 0 to `below` - 1, all as likely, in the place of `like`."""
    return _drawn(partial(torch.randint, below, device=like.device), shape, rng)


def _drawn(draw: Callable[..., Tensor], shape: Sequence[int], rng: Source) -> Tensor:
    if not isinstance(rng, Share):
        return draw(shape, generator=rng)
    mine, *rest = shape
    return draw((rng.world * mine, *rest), generator=rng.whole)[rng.rank * mine :][:mine]


def gaussian_like(tensor: Tensor, rng: Source) -> Tensor:
    """The same in the shape of `tensor` too."""
    return gaussian(tensor.shape, tensor, rng)


def seed_globals(seed: int) -> None:
    """Seed the global sources: nothing here draws from them, a user's own module may (dropout)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(method_rng: torch.Generator) -> Saved:
    """The state of the method's own source and of every global one: tensors, and plain values."""
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
    """Put every source back; False where the run moved to another kind of device and the method's
    source, whose state does not translate, was left as it is."""
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
