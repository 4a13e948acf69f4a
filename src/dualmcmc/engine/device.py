"""Where to compute."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import torch

from dualmcmc.errors import UserError, nearest

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of a period
MOST_THREADS = 8  # more only get in each other's way on the small networks that people train on a CPU


def pick(name: str = "auto") -> torch.device:
    """The device called `name`; auto is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (name == "cuda" or index.isdecimal())):
        raise UserError(f"unknown device '{name}': use auto, cpu or cuda.{nearest(name, ['auto', 'cpu', 'cuda'])}")
    if name != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch sees no CUDA device. Check the driver and that torch is a CUDA build, "
            "or use --device cpu."
        )
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"there is no device '{name}': PyTorch sees {torch.cuda.device_count()} CUDA device(s).")
    return torch.device(name)


def describe(device: torch.device) -> str:
    """The device in words, for the log."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def make_repeatable(device: torch.device, wanted: bool) -> None:
    """On CUDA, keep to kernels whose result does not depend on the order of execution; and to this GPU of several."""
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = not wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_threads(wanted: int | None) -> None:
    """Set the number of CPU threads: what is asked for, or what suits networks of this size.

    OMP_NUM_THREADS, where set, has been obeyed by torch already.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(cores(), MOST_THREADS))


def cores() -> int:
    """CPU cores this process may use: its affinity, and the share a container was given."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def peak_memory(device: torch.device) -> int:
    """The most bytes taken so far: of the GPU by tensors, or of the machine by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
