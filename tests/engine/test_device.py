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
    assert device.pick("auto") == torch.device("cuda")


def test_describe():
    assert device.describe(torch.device("cpu")).startswith("CPU")
