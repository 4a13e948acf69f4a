"""How much memory there is to spare."""

from __future__ import annotations

import math
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
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    return int(max(0, min([free, *map(_left_in, _groups())])))


def _groups() -> list[Path]:
    """The control groups this process is in: a container's or a cluster job's limit is in one of them."""
    top = Path("/sys/fs/cgroup")
    with suppress(OSError, IndexError):
        own = top / Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip("/")
        return [own, *(folder for folder in own.parents if folder.is_relative_to(top))]
    return [top]


def _left_in(group: Path) -> float:
    """What a control group may still take; infinite where it has no limit."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["active_file"]) + int(stat["inactive_file"])  # files' pages are given back
    except (OSError, ValueError, KeyError):
        return math.inf


def in_words(count: float) -> str:
    """Bytes in a unit that people read."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
