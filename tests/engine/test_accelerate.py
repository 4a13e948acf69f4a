import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch._dynamo

from dualmcmc import settings
from dualmcmc.config import Engine
from dualmcmc.engine import accelerate
from dualmcmc.engine.accelerate import choose, evaluators
from dualmcmc.nets import build
from dualmcmc.nets.evaluator import Evaluator
from tests.conftest import tiny

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some kind, to choose for; nothing runs on it."""

    def have(capability=(9, 0), triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(accelerate.importlib.util, "find_spec", lambda name: object() if triton else None)

    have()
    return have


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
def test_what_is_asked_for_is_chosen(gpu, device, engine, expected):
    means = choose(engine, device)
    assert means.in_words == expected
    assert means.notes == ()
    assert means.graphed == (device.type == "cuda" and expected.startswith("compiled"))


def test_what_cannot_be_had_is_said_in_a_line(gpu):
    gpu(triton=False)
    means = choose(Engine(), CUDA)
    assert means.in_words == "eager, tf32"
    assert means.notes == ("not compiled: Triton is not installed; going on eagerly",)
    gpu(capability=(6, 1))
    assert "older than Triton" in choose(Engine(mode="compiled"), CUDA).notes[0]
    gpu(capability=(7, 5))
    assert choose(Engine(), CUDA).in_words == "compiled, tf32"
    means = choose(Engine(precision="bfloat16"), CUDA)
    assert (means.precision, len(means.notes)) == ("tf32", 1)
    means = choose(Engine(precision="tf32"), CPU)
    assert (means.precision, len(means.notes)) == ("float32", 1)


def test_plain_networks_stay_as_they_are():
    config = tiny()
    trio = build(config)
    assert evaluators(trio, config, choose(config.engine, CPU), None) is trio
    in_parts = evaluators(trio, config, choose(config.engine, CPU), 4)
    assert all(isinstance(net, Evaluator) and net.at_once == 4 for net in in_parts.children())


def test_tf32_is_allowed_where_it_is_chosen(gpu, restored_precision):
    for precision, of_convolutions, of_products in (
        ("float32", False, False),
        ("tf32", True, False),
        ("bfloat16", True, True),
    ):
        accelerate.set_precision(choose(Engine(precision=precision), CUDA))
        assert torch.backends.cudnn.allow_tf32 is of_convolutions
        assert torch.backends.cuda.matmul.allow_tf32 is of_products


def test_a_compiler_that_fails_is_done_without(monkeypatch):
    def broken(layers):
        def fail(*given):
            raise RuntimeError("no compiler here\nand a long story")

        return fail

    monkeypatch.setattr(accelerate, "_compiler", lambda *_: broken)
    config = tiny("engine.mode=compiled")
    networks = evaluators(build(config).train(), config, choose(config.engine, CPU), None)
    assert accelerate.compile_for_training(networks, config, 4, CPU) == "RuntimeError: no compiler here"
    assert networks.energy(torch.zeros(2, 1, 8, 8)).shape == (2,)  # eagerly


def test_too_little_memory_is_no_reason_to_go_on(monkeypatch):
    def full(layers):
        def fail(*given):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return fail

    monkeypatch.setattr(accelerate, "_compiler", lambda *_: full)
    config = tiny("engine.mode=compiled")
    networks = evaluators(build(config).train(), config, choose(config.engine, CPU), None)
    with pytest.raises(torch.OutOfMemoryError):
        accelerate.compile_for_training(networks, config, 4, CPU)


def test_what_is_compiled_is_kept_in_the_cache_folder(monkeypatch, cache):
    monkeypatch.setenv(accelerate.CACHE, "/somewhere")  # so that it is put back
    monkeypatch.setattr(accelerate, "CACHE_IS_OURS", True)  # even where torch has set it meanwhile
    accelerate._compiler(CPU, True)
    assert accelerate.os.environ[accelerate.CACHE] == str(cache / "compiled")
    monkeypatch.setenv(accelerate.CACHE, "/elsewhere")
    monkeypatch.setattr(accelerate, "CACHE_IS_OURS", False)
    accelerate._compiler(CPU, True)
    assert accelerate.os.environ[accelerate.CACHE] == "/elsewhere"


@pytest.mark.parametrize(
    ("device", "deterministic", "expected"),
    [
        (CUDA, True, {"layout_optimization": False, "deterministic": True}),
        (CUDA, False, {"layout_optimization": False}),
        (CPU, True, None),
    ],
)
def test_a_repeatable_run_is_not_compiled_by_trial(
    device, deterministic, expected, gpu, monkeypatch, restored_precision, cache
):
    """Which order of sums is the fastest differs from one trial to the next, and with it the last digits of a run."""
    given = []
    config = tiny(f"train.deterministic={deterministic}".lower(), "engine.mode=compiled")
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.torch, "compile", lambda layers, **how: given.append(how["options"]) or layers)
        evaluators(build(config).train(), config, choose(config.engine, device), None)
    assert given
    assert all(options == expected for options in given)
    torch.compile(torch.sin, options=expected)  # names that this PyTorch knows


def test_torch_names_no_cache_before_we_ask():
    code = (
        "from dualmcmc.engine import accelerate, loop, state; from dualmcmc import settings; import torch; "
        "state.TrainState(settings.load_config('digits'), torch.device('cpu')); import torch._dynamo; "
        "accelerate._compiler(accelerate.torch.device('cpu'), True); print(accelerate.os.environ[accelerate.CACHE])"
    )
    clean = {name: value for name, value in os.environ.items() if name != accelerate.CACHE}
    words = [sys.executable, "-c", code]
    answer = subprocess.run(words, env=clean | {"DUALMCMC_DATA": "/mine"}, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "/mine/compiled"


def test_evaluators_set_the_precision_they_need(gpu, restored_precision):
    config = tiny()
    torch.backends.cudnn.allow_tf32 = True
    evaluators(build(config), config, accelerate.Means(False, "float32", CPU), None)
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("preset", ["digits", "cifar10-resnet"])
def test_progress_shows_what_is_compiled(preset, quick_compiler):
    widths = [f"nets.{name}_width=2" for name in ("energy", "generator", "inference")]
    config = settings.load_config(preset, [*widths, "train.batch=2", "engine.mode=compiled"])
    networks = evaluators(build(config).train(), config, choose(config.engine, CPU), None)
    seen = []

    class Watching:
        def __init__(self, what, total, unit):
            seen.append((what, total, unit))

        def __enter__(self):
            return seen.append

        def __exit__(self, *_):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerate.compile_for_training(networks, config, 4, CPU, Watching) is None
    assert seen == [("compiling", 5, "parts"), 1, 1, 1, 1, 1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("backend='inductor' raised:\nLoweringException: no module\n  more", "LoweringException: no module"),
        ("too old", "RuntimeError: too old"),
        ("", "RuntimeError"),
        ("first:\n\n second:\nno colon", "RuntimeError: no colon"),
    ],
)
def test_the_reason_is_the_cause_not_its_wrapping(text, expected):
    assert accelerate.reason(RuntimeError(text)) == expected
