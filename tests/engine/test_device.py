import pytest
import torch

from dualmcmc.engine import device
from dualmcmc.errors import UserError


def test_pick(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.pick("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA"):
        device.pick("cuda")
    with pytest.raises(UserError, match="unknown device 'gpu'"):
        device.pick("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.pick("auto") == torch.device("cuda")
    assert device.pick("cuda:1") == torch.device("cuda:1")
    for name in ("cuda:2", "cuda:x", "cuda:", "cpu:0", ""):
        with pytest.raises(UserError, match="device"):
            device.pick(name)


def test_repeatable_means_deterministic_kernels(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    device.make_repeatable(torch.device("cpu"), True)
    assert not torch.backends.cudnn.deterministic  # only where it matters
    device.make_repeatable(torch.device("cuda"), True)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    device.make_repeatable(torch.device("cuda"), False)
    assert not torch.backends.cudnn.deterministic


def test_describe():
    assert device.describe(torch.device("cpu")).startswith("CPU")


def test_threads_are_set_to_what_is_there(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for count, expected in ((2, 2), (64, device.MOST_THREADS)):
        monkeypatch.setattr(device, "cores", lambda count=count: count)
        device.use_threads(None)
        assert chosen.pop() == expected
    device.use_threads(3)
    assert chosen.pop() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    device.use_threads(None)
    assert chosen == []  # torch has obeyed that already


@pytest.mark.parametrize(("text", "expected"), [("max 100000", 6), ("150000 100000", 2), ("nonsense", 6), (None, 6)])
def test_cores_know_of_containers(monkeypatch, tmp_path, text, expected):
    limit = tmp_path / "cpu.max"
    if text is not None:
        limit.write_text(text)
    monkeypatch.setattr(device, "QUOTA", limit)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(6)))
    assert device.cores() == expected


def test_peak_memory_of_the_process():
    assert device.peak_memory(torch.device("cpu")) > 10_000_000
