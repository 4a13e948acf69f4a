"""How the networks of a run execute on this machine: precision and compilation, resolved from `engine.*`."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualmcmc.config import Config, Engine
from dualmcmc.engine.compiler import make_compiler
from dualmcmc.engine.executor import Executor
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.utils.errors import UserError, first_line

BFLOAT16_CAPABILITY = (8, 0)  # CUDA compute capability
TRITON_CAPABILITY = (7, 0)
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.5}  # relative, of networks as executors; float32 may be tf32
TINY = 1e-12  # against division by 0


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
    set_precision(plan)
    if obstacle := _executor_obstacle(networks, x, z, torch.float32):
        if config.engine.micro_batch:
            raise UserError(f"engine.micro_batch does not support these networks ({obstacle}): set it to null.")
        return without_compilation(plan, obstacle)
    if plan.precision == "bfloat16" and (obstacle := _executor_obstacle(networks, x, z, torch.bfloat16)):
        full = _full_precision(plan)
        return replace(plan, precision=full, notes=(*plan.notes, f"convolutions in {full}: {obstacle}"))
    return plan


def without_compilation(plan: ExecutionPlan, reason: str) -> ExecutionPlan:
    """The plan for networks that run as plain modules; `reason` becomes a note if that changes the plan."""
    if not plan.compiled and plan.precision != "bfloat16":
        return plan
    notes = (*plan.notes, f"running eagerly: {reason}")
    return replace(plan, compiled=False, precision=_full_precision(plan), notes=notes)


def _full_precision(plan: ExecutionPlan) -> str:
    return "tf32" if plan.device.type == "cuda" else "float32"


def _executor_obstacle(networks: Trio, x: Tensor, z: Tensor, dtype: torch.dtype) -> str | None:
    """Why an `Executor` cannot run the networks: it evaluates a copy of the layers as a function of their weights."""
    devices, precision = [x.device] if x.device.type == "cuda" else [], str(dtype).removeprefix("torch.")
    for name, net in networks.named_children():
        inputs, outputs = z if name == "generator" else x, []
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
    compiler = make_compiler(plan.device, config.train.deterministic) if plan.compiled else None
    return Trio(**{name: Executor(net, dtype, micro_batch, compiler) for name, net in trio.named_children()})
