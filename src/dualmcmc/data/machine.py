"""How much memory there is to spare."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


def available_memory(device: torch.device | str = "cpu") -> int:
    """Bytes free on a device: on CUDA the driver's figure, else the system's, or the container's if less."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError, KeyError):  # a container's limit, which MemAvailable does not know
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["active_file"]) + int(stat["inactive_file"])  # given back when it is needed
        free = min(free, limit - used + cached)
    return max(free, 0)


def in_words(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
