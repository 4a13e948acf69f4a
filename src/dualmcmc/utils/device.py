"""Devices, memory, CPU cores and float32 precision. Container limits (cgroups) count everywhere."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from dualmcmc.utils.errors import UserError, nearest, sanitize

CGROUPS = Path("/sys/fs/cgroup")
DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
MAX_THREADS = 8  # more slow down the small networks that people train on a CPU


def resolve_device(name: str = "auto") -> torch.device:
    """The device called `name`; auto is CUDA if available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "mps":
        raise UserError(
            "mps is not supported: statistics and metrics need float64, which it lacks, and nothing is tested on it. "
            "Use --device cpu."
        )
    if not DEVICE.fullmatch(name):
        hint = nearest(name.lower().replace("gpu", "cuda"), ["auto", "cpu", "cuda"])
        raise UserError(f"unknown device '{sanitize(name)}': use auto, cpu, cuda or cuda:N.{hint}")
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UserError(
            f"--device {name}: PyTorch finds no CUDA device. Check the driver and that torch is a CUDA build, "
            "or use --device cpu."
        )
    kind, _, index = name.partition(":")
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device '{name}' does not exist: PyTorch finds {torch.cuda.device_count()} CUDA device(s).")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def device_name(device: torch.device) -> str:
    """The device's name, for logs and records."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"CPU, {count} thread{'s' * (count != 1)}"


def set_deterministic(device: torch.device, deterministic: bool) -> None:
    """On CUDA, select deterministic kernels, and make `device` the current one."""
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_num_threads(requested: int | None) -> None:
    """Set the number of CPU threads. By default one per core, at most 8; torch itself obeys OMP_NUM_THREADS."""
    if requested is not None:
        torch.set_num_threads(requested)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(cpu_count(), MAX_THREADS))


def cpu_count() -> int:
    """Cores this process may use: its affinity and its container's CPU quota."""
    return int(max(1, min([len(os.sched_getaffinity(0)), *map(_cpu_quota, _cgroups())])))


def available_memory(device: torch.device | str = "cpu") -> int:
    """Free bytes on a device: CUDA's figure, or the system's or container's, whichever is less."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    return int(max(0, min([free, *map(_memory_left, _cgroups())])))


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: allocated by tensors on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_memory()


def peak_resident_memory() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _cgroups() -> list[Path]:
    """The control groups of this process, innermost first; a container or cluster job limits one of them."""
    with suppress(OSError, IndexError):
        own = CGROUPS / Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip("/")
        return [own, *(folder for folder in own.parents if folder.is_relative_to(CGROUPS))]
    return [CGROUPS]


def _cpu_quota(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return math.inf if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return math.inf


def _memory_left(group: Path) -> float:
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["active_file"]) + int(stat["inactive_file"])  # page cache is reclaimable
    except (OSError, ValueError, KeyError):
        return math.inf


def format_bytes(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


class NumericSettings(NamedTuple):
    """torch's global settings of precision and choice of kernels."""

    cudnn_tf32: bool
    matmul_tf32: bool
    deterministic: bool
    benchmark: bool

    @classmethod
    def current(cls) -> NumericSettings:
        """Those in effect."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return cls(cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark)

    def apply(self) -> None:
        """Put them into effect."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = self


@contextmanager
def exact_float32() -> Iterator[None]:
    """Disable tf32 and autocast for a while."""
    before = NumericSettings.current()
    before._replace(cudnn_tf32=False, matmul_tf32=False).apply()
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        before.apply()


@contextmanager
def preserved_settings() -> Iterator[None]:
    """Leave torch's number of threads, precision and choice of kernels as they were."""
    before, threads = NumericSettings.current(), torch.get_num_threads()
    try:
        yield
    finally:
        before.apply()
        torch.set_num_threads(threads)
