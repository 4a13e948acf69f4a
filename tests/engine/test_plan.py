import pytest
import torch

from dualmcmc.config import Engine
from dualmcmc.engine import plan
from dualmcmc.engine.executor import Executor
from dualmcmc.engine.plan import ExecutionPlan, build_executors, resolve_plan
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
