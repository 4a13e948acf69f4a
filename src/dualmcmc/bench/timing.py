"""A clock for devices that work ahead of the host, how the device is set up for it, and what it can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dualmcmc.config import Config
from dualmcmc.engine.accelerate import Means, choose
from dualmcmc.engine.device import make_repeatable, pick, use_threads
from dualmcmc.tasks.record import describe_process


def begin(config: Config, device: str, say: Callable[[str], None]) -> Means:
    """Set the machine up as training would; says what cannot be had of what `config.engine` asks for."""
    place = pick(device)
    make_repeatable(place, config.train.deterministic)
    use_threads(config.engine.threads)
    means = choose(config.engine, place)
    for note in means.notes:
        say(note)
    return means


def described(config: Config, device: torch.device) -> dict[str, Any]:
    """What every result begins with: whose settings, and all that is needed to repeat it."""
    return {"preset": config.preset, **describe_process(device)}


def where(result: dict[str, Any]) -> str:
    """The same for people."""
    words, commit = f"{result['device']}, torch {result['torch']}", result["commit"]
    return f"{words}, commit {commit[:7]}{'+' * commit.endswith('+')}" if commit else words


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """The median time of one run."""
    for _ in range(warm_up):
        work()
    wait(device)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


class Operations(TorchDispatchMode):
    """Counts the floating-point operations of convolutions and matrix products, by torch's own formulas.

    (torch's FlopCounterMode does so too, but cannot watch a chain: it follows modules through autograd.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.count += int(formula(*args, **(kwargs or {}), out_val=result))
        return result


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations in a run of it."""
    with Operations() as operations:
        work()
    return operations.count


def flops_by_part(work: Callable[[Callable[[str], None]], object]) -> dict[str, int]:
    """The same by part, of something that tells when each ends; a part may come more than once."""
    found: dict[str, int] = {}

    def lap(part: str) -> None:
        found[part] = found.get(part, 0) + operations.count - sum(found.values())

    with Operations() as operations:
        work(lap)
    return found


class Laps:
    """Times the parts of something that tells when each ends; a part may come more than once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        wait(self.device)
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """A part has ended."""
        wait(self.device)
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now


def ceilings(device: torch.device, precision: str) -> dict[str, float]:
    """The rate of a large matrix product in this precision (FLOP/s), and of a large copy (bytes read and written).

    A CPU's is of float32: few have matrix units for less.
    """
    on_gpu = device.type == "cuda"
    size, room = (8192, 2**31) if on_gpu else (1024, 2**27)
    dtype = torch.bfloat16 if precision == "bfloat16" and on_gpu else torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        product = seconds(lambda: a @ b, device, 20, 3)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    source = torch.empty(room, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, 20, 3)
    return {"matmul_flops": 2 * size**3 / product, "copy_bytes": 2 * room / copy}
