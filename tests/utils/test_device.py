import os
from itertools import pairwise

import pytest
import torch

from dualmcmc.utils import device
from dualmcmc.utils.errors import UserError


def test_resolve_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.resolve_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA"):
        device.resolve_device("cuda")
    with pytest.raises(UserError, match=r"--device cuda:7: PyTorch finds no CUDA"):
        device.resolve_device("cuda:7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.resolve_device("auto") == torch.device("cuda")
    assert device.resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"device 'cuda:2' does not exist: PyTorch finds 2"):
        device.resolve_device("cuda:2")


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown device 'gpu'.*Did you mean 'cuda'"),
        ("CUDA", "unknown device 'CUDA'.*Did you mean 'cuda'"),
        ("cuda:", "unknown device 'cuda:'.*Did you mean 'cuda'"),
        ("cuda:x", "unknown device 'cuda:x'"),
        ("cuda:\u0661", "unknown device"),
        ("cuda:" + "1" * 5000, "unknown device"),
        ("cuda:0\n", r"unknown device 'cuda:0\\n'"),
        ("cpu:0", "unknown device 'cpu:0'.*Did you mean 'cpu'"),
        ("", "unknown device ''"),
        ("mps", "mps is not supported.*Use --device cpu"),
        ("mps:0", "mps is not supported"),
    ],
)
def test_other_names_are_refused_in_one_line(monkeypatch, name, message, available):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(UserError, match=message) as refused:
        device.resolve_device(name)
    assert len(str(refused.value).splitlines()) == 1


def test_device_name():
    assert device.device_name(torch.device("cpu")).startswith("CPU")


def test_deterministic_kernels_on_cuda_only(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # restored afterwards
    device.set_deterministic(torch.device("cpu"), True)
    assert not torch.backends.cudnn.deterministic
    device.set_deterministic(torch.device("cuda"), True)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    device.set_deterministic(torch.device("cuda"), False)
    assert not torch.backends.cudnn.deterministic


def test_number_of_threads(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for count, expected in ((2, 2), (64, device.MAX_THREADS)):
        monkeypatch.setattr(device, "cpu_count", lambda count=count: count)
        device.set_num_threads(None)
        assert chosen.pop() == expected
    device.set_num_threads(3)
    assert chosen.pop() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    device.set_num_threads(None)
    assert chosen == []  # torch has read the variable itself


def make_cgroups(folder, monkeypatch):
    """Two nested control groups, as of a container on a cluster: (inner, outer)."""
    inner = folder / "job" / "step"
    inner.mkdir(parents=True)
    monkeypatch.setattr(device, "_cgroups", lambda: [inner, inner.parent, folder])
    return inner, inner.parent


@pytest.mark.parametrize(
    ("inner_quota", "outer_quota", "expected"),
    [
        ("max 100000", "max 100000", 6),
        ("150000 100000", "max 100000", 2),
        ("max 100000", "50000 100000", 1),  # a limit further out counts too
        ("400000 100000", "300000 100000", 3),
        ("nonsense", None, 6),
        (None, None, 6),
    ],
)
def test_cpu_count_in_a_container(monkeypatch, tmp_path, inner_quota, outer_quota, expected):
    for group, quota in zip(make_cgroups(tmp_path, monkeypatch), (inner_quota, outer_quota), strict=True):
        if quota is not None:
            (group / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert device.cpu_count() == expected


def test_cgroups_of_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "CGROUPS", tmp_path)
    groups = device._cgroups()
    assert groups[-1] == tmp_path
    assert all(inner.parent == outer for inner, outer in pairwise(groups))


def limit_memory(group, limit, used, cached):
    (group / "memory.max").write_text(limit)
    (group / "memory.current").write_text(str(used))
    (group / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 1\n")


def test_available_memory_in_a_container(monkeypatch, tmp_path):
    assert 0 < device.available_memory() < 1 << 50
    inner, outer = make_cgroups(tmp_path, monkeypatch)
    unlimited = device.available_memory()
    limit_memory(outer, "5000", 3000, 999)  # 3000 bytes left: the page cache is reclaimable
    assert device.available_memory() == 3000
    limit_memory(inner, "4000", 3000, 99)
    assert device.available_memory() == 1100
    limit_memory(inner, "1000", 3000, 0)
    assert device.available_memory(torch.device("cpu")) == 0
    limit_memory(inner, "max", 1, 1)
    limit_memory(outer, "max", 1, 1)
    assert device.available_memory() > unlimited / 2


def test_peak_memory():
    assert device.peak_memory(torch.device("cpu")) > 10_000_000


def test_format_bytes():
    texts = [device.format_bytes(count) for count in (0, 999, 1500, 2.46e9, 7e12, 7e15)]
    assert texts == ["0 bytes", "999 bytes", "1.5 kB", "2.46 GB", "7 TB", "7e+03 TB"]


def test_exact_float32(restored_precision):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with device.exact_float32():
            assert (a @ a).dtype == torch.float32
            assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32
