import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from dualmcmc.config import Engine
from dualmcmc.engine import plan
from dualmcmc.engine.executor import Executor
from dualmcmc.engine.plan import ExecutionPlan, build_executors, resolve_plan
from dualmcmc.engine.state import TrainState
from dualmcmc.methods.dual_mcmc import step
from dualmcmc.nets import build
from tests.conftest import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU to plan for; nothing runs on it."""

    def install(capability=(9, 0), triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: object() if triton else None)

    install()
    return install


@pytest.mark.parametrize(
    ("device", "engine", "expected"),
    [
        (CPU, Engine(), "eager, float32"),
        (CPU, Engine(mode="compiled"), "compiled, float32"),
        (CPU, Engine(precision="bfloat16"), "eager, bfloat16"),
        (CUDA, Engine(), "compiled, bfloat16"),
        (CUDA, Engine(mode="eager"), "eager, tf32"),
        (CUDA, Engine(mode="eager", precision="float32"), "eager, float32"),
        (CUDA, Engine(precision="tf32"), "compiled, tf32"),
        (CUDA, Engine(mode="eager", precision="bfloat16"), "eager, bfloat16"),
    ],
)
def test_resolve_plan(fake_gpu, device, engine, expected):
    resolved = resolve_plan(engine, device)
    assert resolved.summary == expected
    assert resolved.notes == ()
    assert resolved.uses_cuda_graph == (device.type == "cuda" and expected.startswith("compiled"))


@pytest.mark.parametrize(
    ("gpu", "device", "engine", "expected", "note"),
    [
        ({"triton": False}, CUDA, Engine(), "eager, tf32", "running eagerly: Triton is not installed"),
        ({"capability": (6, 1)}, CUDA, Engine(mode="compiled"), "eager, tf32", "Triton does not support this GPU"),
        ({"capability": (7, 5)}, CUDA, Engine(), "compiled, tf32", None),
        ({"capability": (7, 5)}, CUDA, Engine(precision="bfloat16"), "compiled, tf32", "compute capability 8.0"),
        ({}, CPU, Engine(precision="tf32"), "eager, float32", "needs CUDA: using float32"),
    ],
)
def test_unmet_requests_are_noted(fake_gpu, gpu, device, engine, expected, note):
    fake_gpu(**gpu)
    resolved = resolve_plan(engine, device)
    assert resolved.summary == expected
    assert [note in text for text in resolved.notes] == ([] if note is None else [True])


def test_networks_are_wrapped_only_if_necessary():
    trio = build(tiny())
    assert build_executors(trio, tiny(), resolve_plan(Engine(), CPU)) is trio
    executors = build_executors(trio, tiny("engine.micro_batch=4"), resolve_plan(Engine(), CPU))
    assert all(isinstance(net, Executor) and net.micro_batch == 4 for net in executors.children())


@pytest.mark.parametrize(
    ("precision", "convolutions", "products"),
    [("float32", False, False), ("tf32", True, False), ("bfloat16", True, True)],
)
def test_tf32_flags(restored_precision, precision, convolutions, products):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not convolutions
    build_executors(build(tiny()), tiny(), ExecutionPlan(False, precision, CPU))
    assert torch.backends.cudnn.allow_tf32 is convolutions
    assert torch.backends.cuda.matmul.allow_tf32 is products


def compile_with(monkeypatch, error):
    """Compile the networks with a compiler that raises `error`."""

    def broken(layers):
        def fail(*_):
            raise error

        return fail

    monkeypatch.setattr(plan, "_compiler", lambda *_: broken)
    config = tiny("engine.mode=compiled")
    executors = build_executors(build(config).train(), config, resolve_plan(config.engine, CPU))
    return executors, plan.compile_for_training(executors, config, 4, CPU)


def test_compile_failure_falls_back_to_eager(monkeypatch):
    executors, reason = compile_with(monkeypatch, RuntimeError("no compiler here\nand details"))
    assert reason == "RuntimeError: no compiler here"
    assert executors.energy(torch.zeros(2, 1, 8, 8)).shape == (2,)


def test_out_of_memory_while_compiling_is_raised(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        compile_with(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))


def test_compiled_code_is_cached(monkeypatch, cache):
    monkeypatch.setenv(plan.CACHE_VARIABLE, "/initial")  # restored afterwards
    monkeypatch.setattr(plan, "CACHE_IS_OURS", True)
    plan._compiler(CPU, True)
    assert os.environ[plan.CACHE_VARIABLE] == str(cache / "compiled")
    monkeypatch.setenv(plan.CACHE_VARIABLE, "/chosen")
    monkeypatch.setattr(plan, "CACHE_IS_OURS", False)
    plan._compiler(CPU, True)
    assert os.environ[plan.CACHE_VARIABLE] == "/chosen"


def test_torch_sets_no_cache_folder_before_us():
    """In a fresh process: importing torch's compiler sets the variable."""
    code = "from dualmcmc.engine import trainer, plan; assert plan.CACHE_IS_OURS"
    environment = {name: value for name, value in os.environ.items() if name != plan.CACHE_VARIABLE}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"),
    [
        (CUDA, True, {"layout_optimization": False, "deterministic": True}),
        (CUDA, False, {"layout_optimization": False}),
        (CPU, True, None),
    ],
)
def test_deterministic_runs_are_compiled_without_autotuning(device, deterministic, expected, monkeypatch):
    monkeypatch.setenv(plan.CACHE_VARIABLE, "/initial")  # restored afterwards
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda layers, **arguments: found.append(arguments["options"]))
        plan._compiler(device, deterministic)(torch.sin)
    assert found == [expected]
    torch.compile(torch.sin, options=expected)  # this PyTorch has options of these names


@pytest.mark.parametrize(("overrides", "count"), [([], 5), (["teaching.second_x_chain=true"], 6)])
def test_compile_for_training(monkeypatch, overrides, count):
    calls, seen = [], []

    def compiler(layers):
        return lambda *arguments: calls.append(len(arguments[2])) or layers(*arguments)

    @contextmanager
    def progress(*task):
        seen.append(task)
        yield seen.append

    monkeypatch.setattr(plan, "_compiler", lambda *_: compiler)
    config = tiny("engine.mode=compiled", *overrides)
    executors = build_executors(build(config).train(), config, resolve_plan(config.engine, CPU))
    assert plan.compile_for_training(executors, config, 4, CPU, progress) is None
    assert seen == [("compiling", count, "parts"), *[1] * count]
    assert calls == [4, 4, 8, 4, 4, 4][:count]  # E is trained on pairs
    assert plan.compile_for_training(executors, config, 4, CPU, progress) is None
    assert len(calls) == count  # nothing left to compile


@pytest.mark.parametrize(
    "overrides", [[], ["teaching.second_x_chain=true"], ["teaching.energy_consistency=1"], ["engine.micro_batch=3"]]
)
def test_an_iteration_evaluates_only_what_was_compiled(monkeypatch, overrides):
    monkeypatch.setattr(plan, "_compiler", lambda *_: lambda layers: lambda *arguments: layers(*arguments))
    config = tiny("engine.mode=compiled", "train.batch=4", *overrides)
    state = TrainState(config, CPU)
    executors = build_executors(state.trio, config, resolve_plan(config.engine, CPU))
    assert plan.compile_for_training(executors, config, 4, CPU) is None
    for executor in executors.children():
        executor._eager = (lambda *_: pytest.fail("not compiled"),) * 2
    stats = step(executors, state.optimizers, torch.rand(4, 1, 8, 8) * 2 - 1, state.rng, config.teaching)
    assert stats["energy_gap"].isfinite()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("backend='inductor' raised:\nLoweringException: no module\n  more", "LoweringException: no module"),
        ("too old", "RuntimeError: too old"),
        ("", "RuntimeError"),
        ("first:\n\n second:\nno colon", "RuntimeError: no colon"),
    ],
)
def test_compile_error_names_the_cause(text, expected):
    assert plan.compile_error(RuntimeError(text)) == expected
