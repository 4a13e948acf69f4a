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
