"""torch.compile with the engine's options. What it produces is kept on disk for the next run."""

from __future__ import annotations

import copyreg
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from dualmcmc.utils.files import cache_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_IS_OURS = CACHE_VARIABLE not in os.environ  # checked at import: torch sets it once its compiler is imported


def make_compiler(device: torch.device, deterministic: bool) -> Callable[..., Callable]:
    """A compiler for this device; `deterministic`: what it produces does not depend on timing."""
    if CACHE_IS_OURS:
        os.environ[CACHE_VARIABLE] = str(_own_cache())
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64  # all networks share the code that calls their layers

    options: dict[str, Any] = {}
    if device.type == "cuda":
        # Layers already have the layout they want; the optimisation would add copies.
        options["layout_optimization"] = False
        # Otherwise reduction orders are chosen by timing, and may differ on another machine or with an empty cache.
        # The option exists since PyTorch 2.10.
        if deterministic and hasattr(torch._inductor.config, "deterministic"):
            options["deterministic"] = True

    def compile_layers(layers: Callable) -> Callable:
        return torch.compile(layers, dynamic=False, fullgraph=True, options=options or None)

    return compile_layers


def cache_path() -> Path:
    """Where compiled code is kept."""
    return _own_cache() if CACHE_IS_OURS else Path(os.environ[CACHE_VARIABLE])


def _own_cache() -> Path:
    return cache_folder() / "compiled"


def caches_compiled_code() -> bool:
    """Whether PyTorch's compiler uses its cache on disk."""
    import torch._functorch.config
    import torch._inductor.config

    configs = torch._inductor.config, getattr(torch.compiler, "config", None)  # older and newer PyTorch
    disabled = any(getattr(config, "force_disable_caches", False) for config in configs)
    return bool(
        torch._inductor.config.fx_graph_cache and torch._functorch.config.enable_autograd_cache and not disabled
    )


@contextmanager
def caching() -> Iterator[None]:
    """Let PyTorch find in its cache what any process has compiled.

    By default it does not cache functions with a hand-written gradient, and its keys depend on which module happened to
    be the first to import torch: that is how `pickle` names memory formats.
    """
    import torch._functorch.config as config

    name = "autograd_cache_allow_custom_autograd_functions"
    patch = config.patch(name, True) if hasattr(config, name) else nullcontext()
    with patch, _MEMORY_FORMATS:
        yield


class _NamedMemoryFormats:
    """During the block, in any thread, memory formats are pickled by their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._before: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._before = copyreg.dispatch_table.get(torch.memory_format)
                copyreg.dispatch_table[torch.memory_format] = _reduce_memory_format
            self._blocks += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                del copyreg.dispatch_table[torch.memory_format]
                if self._before is not None:
                    copyreg.dispatch_table[torch.memory_format] = self._before


_MEMORY_FORMATS = _NamedMemoryFormats()


def _reduce_memory_format(value: torch.memory_format) -> tuple[Callable, tuple[str]]:
    return _memory_format, (str(value).removeprefix("torch."),)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)


def compile_error(error: Exception) -> str:
    """A compiler's failure in one line; the outermost of its nested messages names no cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines.pop(0)
    return lines[0] if lines and ": " in lines[0] else ": ".join([type(error).__name__, *lines[:1]])
