from contextlib import contextmanager

import pytest
import torch

from dualmcmc.engine import plan
from dualmcmc.engine.compilation import compile_for_training
from dualmcmc.engine.plan import build_executors, resolve_plan
from dualmcmc.engine.state import TrainState
from dualmcmc.methods import step
from dualmcmc.nets import build
from tests.conftest import tiny

CPU = torch.device("cpu")


def compile_with(monkeypatch, error):
    """Compile the networks with a compiler that raises `error`."""

    def broken(layers):
        def fail(*_):
            raise error

        return fail

    monkeypatch.setattr(plan, "make_compiler", lambda *_: broken)
    config = tiny("engine.mode=compiled")
    executors = build_executors(build(config).train(), config, resolve_plan(config.engine, CPU))
    return executors, compile_for_training(executors, config, 4, CPU)


def test_compile_failure_falls_back_to_eager(monkeypatch):
    executors, reason = compile_with(monkeypatch, RuntimeError("no compiler here\nand details"))
    assert reason == "RuntimeError: no compiler here"
    assert executors.energy(torch.zeros(2, 1, 8, 8)).shape == (2,)


def test_out_of_memory_while_compiling_is_raised(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        compile_with(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize(("overrides", "count"), [([], 5), (["teaching.second_x_chain=true"], 6)])
def test_compile_for_training(monkeypatch, overrides, count):
    calls, seen = [], []

    def compiler(layers):
        return lambda *arguments: calls.append(len(arguments[2])) or layers(*arguments)

    @contextmanager
    def progress(*task):
        seen.append(task)
        yield seen.append

    monkeypatch.setattr(plan, "make_compiler", lambda *_: compiler)
    config = tiny("engine.mode=compiled", *overrides)
    executors = build_executors(build(config).train(), config, resolve_plan(config.engine, CPU))
    assert compile_for_training(executors, config, 4, CPU, progress) is None
    assert seen == [("compiling", count, "parts"), *[1] * count]
    assert sorted(calls) == [*[4] * (count - 1), 8]  # E is trained on pairs
    assert compile_for_training(executors, config, 4, CPU, progress) is None
    assert len(calls) == count  # nothing left to compile


@pytest.mark.parametrize(
    "overrides", [[], ["teaching.second_x_chain=true"], ["teaching.energy_consistency=1"], ["engine.micro_batch=3"]]
)
def test_an_iteration_evaluates_only_what_was_compiled(monkeypatch, overrides):
    monkeypatch.setattr(plan, "make_compiler", lambda *_: lambda layers: lambda *arguments: layers(*arguments))
    config = tiny("engine.mode=compiled", "train.batch=4", *overrides)
    state = TrainState(config, CPU)
    executors = build_executors(state.trio, config, resolve_plan(config.engine, CPU))
    assert compile_for_training(executors, config, 4, CPU) is None
    for executor in executors.children():
        executor._eager = (lambda *_: pytest.fail("not compiled"),) * 2
    stats = step(executors, state.optimizers, torch.rand(4, 1, 8, 8) * 2 - 1, state.rng, config.teaching)
    assert stats["energy_gap"].isfinite()
