"""Timing of asynchronous devices, FLOP counts, and the peak rates of a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dualmcmc.config import Config
from dualmcmc.engine.plan import ExecutionPlan, resolve_plan
from dualmcmc.tasks.record import describe_process
from dualmcmc.utils.device import resolve_device, set_deterministic, set_num_threads


def set_up(config: Config, device_name: str, notify: Callable[[str], None]) -> ExecutionPlan:
    """Configure torch as training would; `notify` receives the plan's notes."""
    device = resolve_device(device_name)
    set_deterministic(device, config.train.deterministic)
    set_num_threads(config.engine.threads)
    plan = resolve_plan(config.engine, device)
    for note in plan.notes:
        notify(note)
    return plan


def describe(config: Config, device: torch.device) -> dict[str, Any]:
    """The first entries of every result: the preset, and what is needed to repeat the measurement."""
    return {"preset": config.preset, **describe_process(device)}


def format_environment(result: dict[str, Any]) -> str:
    """Device, torch version and commit of a result."""
    text, commit = f"{result['device']}, torch {result['torch']}", result["commit"]
    return f"{text}, commit {commit[:7]}{'+' * commit.endswith('+')}" if commit else text


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(function: Callable[[], object], device: torch.device, repeats: int, warmup: int = 2) -> float:
    """The median time of one call."""
    for _ in range(warmup):
        function()
    synchronize(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class LapTimer:
    """Times the parts of a function that calls it with a part's name when that part ends. Parts may repeat."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Start the first part."""
        synchronize(self.device)
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """End a part."""
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of convolutions and matrix products by torch's formulas.

    torch's FlopCounterMode tracks modules through autograd, which fails inside a Langevin chain.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def count_flops(function: Callable[[], object]) -> int:
    """FLOPs of one call."""
    with FlopCounter() as counter:
        function()
    return counter.flops


def count_flops_by_part(function: Callable[[Callable[[str], None]], object]) -> dict[str, int]:
    """FLOPs of each part of a function that takes a callback like `LapTimer`."""
    flops: dict[str, int] = {}

    def lap(part: str) -> None:
        flops[part] = flops.get(part, 0) + counter.flops - sum(flops.values())

    with FlopCounter() as counter:
        function(lap)
    return flops


def measure_peak_rates(device: torch.device, precision: str) -> dict[str, float]:
    """Rates of a large matrix product in this precision and of a large copy (bytes read plus written).

    On a CPU always in float32: few CPUs have matrix units for lower precisions.
    """
    on_gpu = device.type == "cuda"
    size, copied_bytes = (8192, 2**31) if on_gpu else (1024, 2**27)
    dtype = torch.bfloat16 if precision == "bfloat16" and on_gpu else torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        matmul_seconds = median_seconds(lambda: a @ b, device, 20, 3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_seconds = median_seconds(lambda: target.copy_(source), device, 20, 3)
    return {
        "matmul_flops_per_second": 2 * size**3 / matmul_seconds,
        "copy_bytes_per_second": 2 * copied_bytes / copy_seconds,
    }
