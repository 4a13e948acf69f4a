"""How the networks of a run execute on this machine: precision and compilation, resolved from `engine.*`."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dualmcmc.config import Config, Engine
from dualmcmc.engine.executor import Executor, Mode
from dualmcmc.methods.terms import energy_images
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.utils.errors import UserError, first_line
from dualmcmc.utils.files import cache_folder
from dualmcmc.utils.progress import ProgressFactory, no_progress

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CACHE_IS_OURS = CACHE_VARIABLE not in os.environ  # checked at import: torch sets it once its compiler is imported
BFLOAT16_CAPABILITY = (8, 0)  # CUDA compute capability
TRITON_CAPABILITY = (7, 0)
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.5}  # relative, of networks as executors; float32 may be tf32
TINY = 1e-12  # against division by 0
Task = tuple[Executor, Mode, Tensor]  # to compile: a network, a mode, an input of the right shape


@dataclass(frozen=True)
class ExecutionPlan:
    """What `engine.*` resolves to on this machine."""

    compiled: bool
    precision: str  # float32, tf32 or bfloat16
    device: torch.device
    notes: tuple[str, ...] = ()  # requests that this machine cannot meet

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether an iteration is captured as one CUDA graph."""
        return self.compiled and self.device.type == "cuda"

    @property
    def summary(self) -> str:
        """For the log."""
        return f"{'compiled' if self.compiled else 'eager'}, {self.precision}"


def resolve_plan(cfg: Engine, device: torch.device) -> ExecutionPlan:
    """What this machine can do of what `cfg` requests."""
    on_gpu, notes = device.type == "cuda", []
    compiled = cfg.mode == "compiled" or (cfg.mode == "auto" and on_gpu)
    obstacle = _compile_obstacle(device) if compiled else None
    if obstacle:
        compiled = False
        notes.append(f"running eagerly: {obstacle}")
    precision = cfg.precision
    if precision == "auto":
        precision = "bfloat16" if compiled and _supports_bfloat16(device) else "tf32" if on_gpu else "float32"
    elif precision == "bfloat16" and on_gpu and not _supports_bfloat16(device):
        precision = "tf32"
        notes.append("engine.precision=bfloat16 needs a GPU of compute capability 8.0: using tf32")
    elif precision == "tf32" and not on_gpu:
        precision = "float32"
        notes.append("engine.precision=tf32 needs CUDA: using float32")
    return ExecutionPlan(compiled, precision, device, tuple(notes))


def _compile_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return "Triton does not support this GPU (compute capability below 7.0)"
    return None


def _supports_bfloat16(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY


def set_precision(plan: ExecutionPlan) -> None:
    """Whether float32 operations on CUDA may use tf32.

    Matrix products, few and small here, use it only if the convolutions are in bfloat16 anyway.
    """
    torch.backends.cudnn.allow_tf32 = plan.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = plan.precision == "bfloat16"


def fit_plan(plan: ExecutionPlan, networks: Trio, config: Config) -> ExecutionPlan:
    """The plan for networks of the caller: without what they do not run with, which is tried on random inputs."""
    if not (plan.compiled or plan.precision == "bfloat16" or config.engine.micro_batch):
        return plan
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.rand(2, *config.data.sample_shape, generator=generator) - 1).to(plan.device)
    z = torch.randn(2, config.teaching.latent_dim, generator=generator).to(plan.device)
    full = "tf32" if plan.device.type == "cuda" else "float32"
    set_precision(plan)
    if obstacle := _executor_obstacle(networks, x, z, torch.float32):
        if config.engine.micro_batch:
            raise UserError(f"engine.micro_batch does not support these networks ({obstacle}): set it to null.")
        notes = (*plan.notes, f"running eagerly: {obstacle}")
        return replace(plan, compiled=False, precision=full, notes=notes)
    if plan.precision == "bfloat16" and (obstacle := _executor_obstacle(networks, x, z, torch.bfloat16)):
        return replace(plan, precision=full, notes=(*plan.notes, f"convolutions in {full}: {obstacle}"))
    return plan


def _executor_obstacle(networks: Trio, x: Tensor, z: Tensor, dtype: torch.dtype) -> str | None:
    """Why an `Executor` cannot run the networks: it evaluates a copy of the layers as a function of their weights."""
    devices, precision = [x.device] if x.device.type == "cuda" else [], str(dtype).removeprefix("torch.")
    for (name, net), inputs in zip(networks.named_children(), (x, z, x), strict=True):
        outputs = []
        try:
            for function in (copy.deepcopy(net), Executor(net, dtype)):  # a module may keep what it computes
                with torch.random.fork_rng(devices), frozen(function) as frozen_function:
                    torch.manual_seed(0)  # for modules that draw random numbers
                    output = frozen_function(inputs.detach().requires_grad_())
                    outputs.append(output if isinstance(output, Tensor) else torch.cat(tuple(output)))
        except Exception as error:  # a module may raise anything
            return f"networks.{name} fails with convolutions in {precision} ({first_line(error)})"
        error_size = (outputs[1] - outputs[0]).norm() / outputs[0].norm().clamp(min=TINY)
        if not error_size <= TOLERANCE[dtype]:
            return f"networks.{name} computes something else with convolutions in {precision}"
    return None


def build_executors(trio: Trio, config: Config, plan: ExecutionPlan) -> Trio:
    """The networks as the plan runs them: `trio` itself if it runs eagerly, in float32, in whole batches."""
    set_precision(plan)
    micro_batch = config.engine.micro_batch
    if not (plan.compiled or plan.precision == "bfloat16" or micro_batch):
        return trio
    dtype = torch.bfloat16 if plan.precision == "bfloat16" else torch.float32
    compiler = _compiler(plan.device, config.train.deterministic) if plan.compiled else None
    return Trio(**{name: Executor(net, dtype, micro_batch, compiler) for name, net in trio.named_children()})


def _compiler(device: torch.device, deterministic: bool) -> Callable[..., Callable]:
    """torch.compile with our options; compiled code is cached for the next run."""
    if CACHE_IS_OURS:
        os.environ[CACHE_VARIABLE] = str(cache_folder() / "compiled")
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

    def compiler(layers: Callable) -> Callable:
        return torch.compile(layers, dynamic=False, fullgraph=True, options=options or None)

    return compiler


def compile_for_training(
    executors: Trio, config: Config, batch: int, device: torch.device, progress: ProgressFactory = no_progress
) -> str | None:
    """Compile everything an iteration on `batch` images needs. On failure all run eagerly; returns the reason."""
    energy, generator, inference = _as_executors(executors)
    images, z = _zeros(config, energy_images(config.teaching) * batch, device)
    x, z = images[:batch], z[:batch]
    tasks = [
        (energy, Mode.CHAIN, x),
        (generator, Mode.CHAIN, z),
        (energy, Mode.TRAIN, images),
        (generator, Mode.TRAIN, z),
        (inference, Mode.TRAIN, x),
    ]
    if config.teaching.second_x_chain:
        tasks.append((generator, Mode.FROZEN, z))
    return _compile([energy, generator, inference], tasks, progress)


def compile_for_sampling(
    executors: Trio, config: Config, sizes: list[int], z_chain: bool, device: torch.device, progress: ProgressFactory
) -> str | None:
    """Compile the x-chain (or z-chain) of a trained run for batches of these sizes; returns as above."""
    energy, generator, _ = _as_executors(executors)
    tasks: list[Task] = []
    for size in sorted(set(sizes)):
        x, z = _zeros(config, size, device)
        tasks.append((generator, Mode.FROZEN, z))
        tasks.append((generator, Mode.CHAIN, z) if z_chain else (energy, Mode.CHAIN, x))
    return _compile([energy, generator], tasks, progress)


def _as_executors(executors: Trio) -> list[Executor]:
    found = [net for net in executors.children() if isinstance(net, Executor)]
    assert len(found) == 3, "the plan does not compile these networks"
    return found


def _zeros(config: Config, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.zeros(count, *config.data.sample_shape, device=device)
    return images, torch.zeros(count, config.teaching.latent_dim, device=device)


def _compile(executors: list[Executor], tasks: list[Task], progress: ProgressFactory) -> str | None:
    missing = [task for task in tasks if not task[0].is_compiled(*task[1:])]
    if not missing:
        return None
    try:
        with progress("compiling", len(missing), "parts") as advance, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for executor, mode, inputs in missing:
                executor.compile_ahead(mode, inputs)
                advance(1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler and its tools may raise anything
        for executor in executors:
            executor.disable_compilation()
        return compile_error(error)
    return None


def compile_error(error: Exception) -> str:
    """A compiler's failure in one line; the outermost of its nested messages names no cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(":"):
        lines.pop(0)
    return lines[0] if lines and ": " in lines[0] else ": ".join([type(error).__name__, *lines[:1]])
