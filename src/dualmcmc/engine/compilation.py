"""Compilation of everything a run needs, before it starts."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, closing
from dataclasses import replace

import torch
from torch import Tensor

from dualmcmc.config import Config
from dualmcmc.engine.compile_worker import Job, compile_in_parallel
from dualmcmc.engine.compiler import caching, compile_error
from dualmcmc.engine.executor import Executor, Mode
from dualmcmc.methods import load_method
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.rng import make_generator
from dualmcmc.utils.progress import Advance, ProgressFactory, no_progress

Task = tuple[Executor, Mode, Tensor]  # a network, a mode, an input of the right shape
SAMPLES = 2  # that show what an iteration evaluates


def compile_for_training(
    executors: Trio, config: Config, batch: int, device: torch.device, progress: ProgressFactory = no_progress
) -> str | None:
    """Compile everything an iteration on `batch` images needs. On failure all run eagerly; returns the reason."""
    tasks = _evaluations(executors, config, batch, device)
    return _compile(_as_executors(executors), tasks, config.train.deterministic, progress)


def _evaluations(executors: Trio, config: Config, batch: int, device: torch.device) -> list[Task]:
    """What an iteration of the method evaluates, found by evaluating its losses on a few zeros, with short chains."""
    x, z = _zeros(config, SAMPLES, device)
    method, rng = load_method(config.method), make_generator(0, device)
    teaching = replace(config.teaching.with_short_chains(1), buffer_size=SAMPLES)
    tensors = method.initial_memory(teaching, config.data.sample_shape, SAMPLES, 0, device)
    memory = Memory(tensors, torch.arange(SAMPLES, device=device), read_only=True)
    with ExitStack() as stack:
        calls = [(net, stack.enter_context(net.recording())) for net in _as_executors(executors)]
        method.evaluate(executors, x, z, rng, teaching, memory=memory)
        if method.after is not None:
            method.after(executors, x, z, rng, teaching)
    return [
        (net, mode, inputs.new_zeros(len(inputs) * batch // SAMPLES, *inputs.shape[1:]))
        for net, seen in calls
        for mode, inputs in seen
    ]


def compile_for_sampling(
    executors: Trio, config: Config, sizes: list[int], z_chain: bool, device: torch.device, progress: ProgressFactory
) -> str | None:
    """Compile the x-chain (or z-chain) of a trained run for batches of these sizes; returns as above."""
    tasks: list[Task] = []
    for size in sorted(set(sizes)):
        x, z = _zeros(config, size, device)
        if isinstance(executors.generator, Executor):
            tasks += [(executors.generator, mode, z) for mode in (Mode.FROZEN, Mode.CHAIN)[: 1 + z_chain]]
        if isinstance(executors.energy, Executor) and not z_chain:
            tasks.append((executors.energy, Mode.CHAIN, x))
    return _compile(_as_executors(executors), tasks, config.train.deterministic, progress)


def _as_executors(executors: Trio) -> list[Executor]:
    found = [net for net in executors.children() if isinstance(net, Executor)]
    assert len(found) == len(list(executors.children())), "the plan does not compile these networks"
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
