"""How the networks of a run are evaluated on this machine: chosen, built, compiled, or refused with a reason."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dualmcmc.config import Config, Engine
from dualmcmc.data.cache import cache_folder
from dualmcmc.nets import Trio, build
from dualmcmc.nets.evaluator import Evaluator, Purpose
from dualmcmc.progress import Watch, quiet

CACHE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_IS_OURS = CACHE not in os.environ  # asked here, first: torch sets it too, as soon as its compiler is imported
BFLOAT16_FROM = (8, 0)  # compute capability
TRITON_FROM = (7, 0)
Part = tuple[Evaluator, Purpose, torch.Tensor]  # to be compiled: a network, what for, inputs of the shape


@dataclass(frozen=True)
class Means:
    """What `engine` comes to on this machine."""

    compiled: bool
    precision: str  # float32, tf32 or bfloat16
    device: torch.device
    notes: tuple[str, ...] = ()  # what was asked for and cannot be had

    @property
    def graphed(self) -> bool:
        """Whether an iteration becomes one CUDA graph."""
        return self.compiled and self.device.type == "cuda"

    @property
    def in_words(self) -> str:
        """For the log."""
        return f"{'compiled' if self.compiled else 'eager'}, {self.precision}"


def choose(cfg: Engine, device: torch.device) -> Means:
    """Make out what can be had of what `cfg` asks for."""
    on_gpu, notes = device.type == "cuda", []
    compiled = cfg.mode == "compiled" or (cfg.mode == "auto" and on_gpu)
    reason = _cannot_compile(device) if compiled else None
    if reason:
        compiled = False
        notes.append(f"not compiled: {reason}; going on eagerly")
    precision = cfg.precision
    if precision == "auto":
        precision = "bfloat16" if compiled and _has_bfloat16(device) else "tf32" if on_gpu else "float32"
    elif precision == "bfloat16" and on_gpu and not _has_bfloat16(device):
        precision = "tf32"
        notes.append("engine.precision=bfloat16 needs a GPU of compute capability 8.0: going on with tf32")
    elif precision == "tf32" and not on_gpu:
        precision = "float32"
        notes.append("engine.precision=tf32 is for CUDA: going on with float32")
    return Means(compiled, precision, device, tuple(notes))


def _cannot_compile(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < TRITON_FROM:
        return "the GPU is older than Triton supports (compute capability 7.0)"
    return None


def _has_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_FROM


def set_precision(means: Means) -> None:
    """What is left in float32 on CUDA: may it be computed in tf32?

    Matrix products, which are few and small here, only where the convolutions are coarser still.
    """
    torch.backends.cudnn.allow_tf32 = means.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = means.precision == "bfloat16"


def evaluators(trio: Trio, config: Config, means: Means, micro_batch: int | None) -> Trio:
    """The networks as the engine runs them: `trio` itself where nothing about it is special."""
    set_precision(means)
    coarse = means.precision == "bfloat16"
    if not (means.compiled or coarse or micro_batch):
        return trio
    bare = build(replace(config, nets=replace(config.nets, spectral_norm=False)))
    dtype = torch.bfloat16 if coarse else torch.float32
    compiler = _compiler(means.device, config.train.deterministic) if means.compiled else None
    nets = {
        name: Evaluator(net, bare.get_submodule(name), dtype, micro_batch, compiler)
        for name, net in trio.named_children()
    }
    return Trio(**nets)


def _compiler(device: torch.device, repeatable: bool) -> Callable[..., Callable]:
    """torch.compile as it is used here; what it makes is kept in the cache folder for the next run."""
    if CACHE_IS_OURS:
        os.environ[CACHE] = str(cache_folder() / "compiled")
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = 64  # all networks share the few lines that call their layers

    options: dict[str, Any] = {}
    if device.type == "cuda":
        # The layers are laid out for a GPU as they are: a guess at better orders of the channels adds copies.
        options["layout_optimization"] = False
        # Else the order of sums is the one that was fastest when it was tried out: by chance, another one on the next
        # machine or with an empty cache. PyTorch knows the option since 2.10.
        if repeatable and hasattr(torch._inductor.config, "deterministic"):
            options["deterministic"] = True

    def compiler(layers: Callable) -> Callable:
        return torch.compile(layers, dynamic=False, fullgraph=True, options=options or None)

    return compiler


def compile_for_training(
    networks: Trio, config: Config, batch: int, device: torch.device, watch: Watch = quiet
) -> str | None:
    """Have everything compiled that an iteration on `batch` images needs; the reason where it cannot be, and then all
    runs eagerly."""
    energy, generator, inference = _evaluators(networks)
    pairs, z = _zeros(config, 2 * batch, device)
    x, z = pairs[:batch], z[:batch]
    parts = [
        (energy, Purpose.CHAIN, x),
        (generator, Purpose.CHAIN, z),
        (energy, Purpose.LEARNING, pairs),
        (generator, Purpose.LEARNING, z),
        (inference, Purpose.LEARNING, x),
    ]
    if config.teaching.second_x_chain:
        parts.append((generator, Purpose.STILL, z))
    return _compile([energy, generator, inference], parts, watch)


def compile_for_use(
    networks: Trio, config: Config, sizes: list[int], z_chain: bool, device: torch.device, watch: Watch
) -> str | None:
    """Have compiled what the chains of a trained run need, on x or on z, in batches of these sizes; as above."""
    energy, generator, _ = _evaluators(networks)
    parts: list[Part] = []
    for size in sorted(set(sizes)):
        x, z = _zeros(config, size, device)
        parts.append((generator, Purpose.STILL, z))
        parts.append((generator, Purpose.CHAIN, z) if z_chain else (energy, Purpose.CHAIN, x))
    return _compile([energy, generator], parts, watch)


def _evaluators(networks: Trio) -> list[Evaluator]:
    found = [network for network in networks.children() if isinstance(network, Evaluator)]
    assert len(found) == 3, "these networks were not made to be compiled"
    return found


def _zeros(config: Config, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    data = config.data
    images = torch.zeros(count, data.channels, data.size, data.size, device=device)
    return images, torch.zeros(count, config.teaching.latent_dim, device=device)


def _compile(networks: list[Evaluator], parts: list[Part], watch: Watch) -> str | None:
    lacking = [part for part in parts if not part[0].is_ready(*part[1:])]
    if not lacking:
        return None
    try:
        with watch("compiling", len(lacking), "parts") as advance, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for network, purpose, inputs in lacking:
                network.compile_ahead(purpose, inputs)
                advance(1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler and its tools may raise
        for network in networks:
            network.give_up_compiling()
        return reason(error)
    return None


def reason(error: Exception) -> str:
    """Why a compiler failed, in a line: it wraps one complaint into another, and the first names no cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines.pop(0)
    return lines[0] if lines and ": " in lines[0] else ": ".join([type(error).__name__, *lines[:1]])
