"""Whether the reference and our engine compute the same thing, which must be known before their times mean anything."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dualmcmc.config import Chain, Config
from dualmcmc.data.feed import Feed
from dualmcmc.data.store import Memory
from dualmcmc.engine.accelerate import Means
from dualmcmc.engine.graph import WARM_UP
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.state import TrainState
from dualmcmc.errors import UserError
from dualmcmc.pictures import from_uint8
from dualmcmc.precision import exact_float32

FLOAT32_BOUND = 1e-4  # largest relative difference of any loss
COARSE_BOUND = 0.05  # the same in tf32 and bfloat16
SHORTER = 0.01  # size of the chains' steps in the check, of their own
GRADIENT_SLACK = 4  # norms of gradients may differ by so many times the bound
Numbers = dict[str, float]


def reference_module() -> ModuleType:
    """benchmarks/reference.py, which a wheel carries beside this file."""
    here = Path(__file__).parent
    for path in (here / "reference.py", *(up / "benchmarks" / "reference.py" for up in here.parents)):
        if path.is_file():
            spec = importlib.util.spec_from_file_location("dualmcmc_reference", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise UserError("benchmarks/reference.py is not here: add --no-reference, or run it in a checkout.")


def check(iteration: Iteration, precision: str) -> dict[str, Any]:
    """See that our engine computes what the reference does, with equal weights and equal noise.

    `iteration`: fresh and prepared; it must compute in `precision`. Nothing is learned meanwhile, so that every
    iteration starts from the same weights: some run before, some inside the CUDA graph. Chains take short steps.
    """
    config, device = iteration.config, iteration.state.device
    iteration.go_on_with(_still(config))
    ours = _stats_of_ours(iteration)
    iteration.go_on_with(config)
    theirs = _stats_of_reference(config, device, len(ours))
    rows = [_differences(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    worst = {name: max(row[name] for row in rows) for name in rows[0]}
    name, bound = max(worst, key=lambda key: worst[key]), FLOAT32_BOUND if precision == "float32" else COARSE_BOUND
    if worst[name] > bound:
        raise UserError(
            f"our engine ({iteration.means.in_words}) and the reference disagree: {name} differs by "
            f"{worst[name]:.2g}, more than {bound:g}. Nothing was timed."
        )
    return {"bound": bound, "largest": worst[name], "differences": worst}


def _differences(ours: Numbers, theirs: Numbers) -> Numbers:
    """How far each number is off, relative to it; energies, whose zero means nothing, relative to the larger mean."""
    scale = max(abs(theirs["energy_data"]), abs(theirs["energy_sample"]))
    found = {}
    for name, value in theirs.items():
        size = scale if name.startswith("energy") else abs(value)
        slack = GRADIENT_SLACK if name.startswith("grad_norm") else 1
        difference = abs(ours[name] - value) / (size + 1e-12) / slack
        found[name] = difference if math.isfinite(difference) else math.inf  # a NaN would lose every comparison
    return found


def _still(config: Config) -> Config:
    """The same without learning, and with chains that hardly move.

    At full size a step of an untrained network's chain blows a difference up tenfold, ten steps out of all
    proportion: two runs that round differently then have little left to compare.
    """
    optim, teaching = config.optim, config.teaching
    slow = {name: replace(getattr(optim, name), lr=1e-30) for name in ("energy", "generator", "inference")}

    def shorter(chain: Chain) -> Chain:
        return replace(chain, step_size=chain.step_size * SHORTER)

    teaching = replace(teaching, x_chain=shorter(teaching.x_chain), z_chain=shorter(teaching.z_chain))
    return replace(config, optim=replace(optim, **slow), teaching=teaching)


def _stats_of_ours(iteration: Iteration) -> list[Numbers]:
    found = []
    for _ in range(WARM_UP + 2 if iteration.means.graphed else 2):
        iteration()
        numbers = iteration.window.read(1)
        numbers.pop("energy_gap_max")
        found.append(numbers)
    return found


def _stats_of_reference(config: Config, device: torch.device, count: int) -> list[Numbers]:
    reference, rng = build_reference(_still(config), device)
    x = random_images(config, device)
    with exact_float32():
        return [{n: v.item() for n, v in reference.iteration(x, rng).items()} for _ in range(count)]


def refuse_what_the_reference_lacks(config: Config) -> None:
    """The reference clips no gradients."""
    for name, chain in (("x_chain", config.teaching.x_chain), ("z_chain", config.teaching.z_chain)):
        if chain.grad_clip is not None:
            raise UserError(f"the reference has no teaching.{name}.grad_clip: leave it out, or add --no-reference.")


def build_reference(config: Config, device: torch.device) -> tuple[Any, torch.Generator]:
    """The reference with the weights and the noise that our engine begins with."""
    state = TrainState(config, device)
    reference = reference_module().Reference(config, device)
    reference.nets.load_state_dict(state.trio.state_dict())
    return reference, state.rng


def _pixels(config: Config) -> Tensor:
    """Random bytes, one batch of them: every iteration then has the same images, in some order."""
    shape = (config.train.batch, config.data.channels, config.data.size, config.data.size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def random_images(config: Config, device: torch.device) -> Tensor:
    """One batch of noise, as images."""
    return from_uint8(_pixels(config)).to(device)


class _Unshuffled(Feed):
    """The one batch there is, as it lies: the reference gets the same."""

    def plan(self, start: int) -> tuple[Tensor, ...]:
        return (torch.arange(self.share, device=self._order.device),)


def build_iteration(config: Config, means: Means) -> Iteration:
    """Our engine on one batch of noise, always the same."""
    state = TrainState(config, means.device)
    feed = _Unshuffled(Memory(_pixels(config)), config.seed, config.train.batch, means.device, "device")
    return Iteration(config, state, feed, means)
