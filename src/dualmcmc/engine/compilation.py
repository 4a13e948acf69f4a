"""Compilation of everything a run needs, before it starts."""

from __future__ import annotations

import warnings
from contextlib import closing

import torch
from torch import Tensor

from dualmcmc.config import Config
from dualmcmc.engine.compile_worker import Job, compile_in_parallel
from dualmcmc.engine.compiler import caching, compile_error
from dualmcmc.engine.executor import Executor, Mode
from dualmcmc.methods.terms import energy_images
from dualmcmc.nets import Trio
from dualmcmc.utils.progress import Advance, ProgressFactory, no_progress

Task = tuple[Executor, Mode, Tensor]  # a network, a mode, an input of the right shape


def compile_for_training(
    executors: Trio, config: Config, batch: int, device: torch.device, progress: ProgressFactory = no_progress
) -> str | None:
    """Compile everything an iteration on `batch` images needs. On failure all run eagerly; returns the reason."""
    energy, generator, inference = _as_executors(executors)
    images, z = _zeros(config, energy_images(config.teaching) * batch, device)
    x, z = images[:batch], z[:batch]
    tasks = [
        (energy, Mode.CHAIN, x),
        (generator, Mode.CHAIN, z),
        (energy, Mode.TRAIN, images),
        (generator, Mode.TRAIN, z),
        (inference, Mode.TRAIN, x),
    ]
    if config.teaching.second_x_chain:
        tasks.append((generator, Mode.FROZEN, z))
    return _compile([energy, generator, inference], tasks, config.train.deterministic, progress)


def compile_for_sampling(
    executors: Trio, config: Config, sizes: list[int], z_chain: bool, device: torch.device, progress: ProgressFactory
) -> str | None:
    """Compile the x-chain (or z-chain) of a trained run for batches of these sizes; returns as above."""
    energy, generator, _ = _as_executors(executors)
    tasks: list[Task] = []
    for size in sorted(set(sizes)):
        x, z = _zeros(config, size, device)
        tasks.append((generator, Mode.FROZEN, z))
        tasks.append((generator, Mode.CHAIN, z) if z_chain else (energy, Mode.CHAIN, x))
    return _compile([energy, generator], tasks, config.train.deterministic, progress)


def _as_executors(executors: Trio) -> list[Executor]:
    found = [net for net in executors.children() if isinstance(net, Executor)]
    assert len(found) == 3, "the plan does not compile these networks"
    return found


def _zeros(config: Config, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.zeros(count, *config.data.sample_shape, device=device)
    return images, torch.zeros(count, config.teaching.latent_dim, device=device)


def _compile(
    executors: list[Executor], tasks: list[Task], deterministic: bool, progress: ProgressFactory
) -> str | None:
    parts = [(net, mode, part) for net, mode, inputs in tasks for part in net.to_compile(mode, inputs)]
    if not parts:
        return None
    try:
        with progress("compiling", len(parts), "parts") as advance, warnings.catch_warnings(), caching():
            warnings.simplefilter("ignore")
            _compile_parts(parts, deterministic, advance)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler and its tools may raise anything
        for net in executors:
            net.disable_compilation()
        return compile_error(error)
    return None


def _compile_parts(parts: list[Task], deterministic: bool, advance: Advance) -> None:
    """Compile parts; if memory runs out while other processes compile too, the rest without them."""
    left = dict(enumerate(parts))

    def compile_part(index: int) -> None:
        net, mode, inputs = left[index]
        net.compile_ahead(mode, inputs)
        del left[index]
        advance(1)

    with closing(compile_in_parallel([Job.of(*part, deterministic) for part in parts])) as order:
        for index in order:
            try:
                compile_part(index)
            except torch.OutOfMemoryError:
                break
    for index in list(left):
        compile_part(index)
