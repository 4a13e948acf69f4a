"""Several processes, connected by Lightning Fabric over torch.distributed.

Fabric determines rank and device for every launcher. Gradients are averaged by DDP; BatchNorm can be
synchronised, also inside chains.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dualmcmc.engine.distributed import SINGLE_PROCESS, SLURM_TASKS, TORCHELASTIC, T, World, is_launched
from dualmcmc.engine.watchdog import Watchdog
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import frozen
from dualmcmc.utils.device import resolve_device
from dualmcmc.utils.errors import ProcessLost, UserError, first_line
from dualmcmc.utils.extras import require

TIMEOUT = timedelta(hours=2)  # of a collective on devices
HOST_TIMEOUT = timedelta(days=7)  # rank 0 may be packing a large dataset; the watchdog notices a stalled process
POLL = timedelta(seconds=0.2)  # in between, signal handlers can run


class DistributedWorld(World):
    """One of several processes.

    Device tensors use the default group (NCCL on GPUs). Python objects and liveness checks use a gloo
    group, which never makes a GPU wait.
    """

    launched = True

    def __init__(self, fabric: Any, watchdog: Watchdog) -> None:
        self._fabric, self._watchdog = fabric, watchdog
        self.rank, self.size = fabric.global_rank, fabric.world_size
        watchdog.mark()
        self._host_group: Any = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        self._pending: tuple[Any, Tensor] | None = None  # the all-reduce of the previous any_rank()
        self._machines = len(set(self.all_gather(socket.gethostname())))

    @property
    def summary(self) -> str:
        if self.size == 1:
            return "1 process"
        return f"{self.size} processes on {self._machines} machine{'s' * (self._machines > 1)}"

    def device(self, requested: torch.device) -> torch.device:
        found: torch.device = self._fabric.device
        return found

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        failure: str | None = None
        with self.detect_lost_process():
            try:
                yield
            except UserError as error:
                failure = str(error)
            self._raise_first(self.all_gather(failure))

    def _raise_first(self, failures: list[str | None]) -> None:
        """Raise the failure of the lowest rank on rank 0; exit quietly elsewhere."""
        failed = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        if not failed:
            return
        rank, text = failed[0]
        if not self.is_main:
            raise SystemExit(2)
        raise UserError(text if rank == 0 else f"rank {rank} of {self.size}: {text}")

    @contextmanager
    def detect_lost_process(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Connection"))
            if not lost or self.size == 1:
                raise
            raise ProcessLost(
                f"another of the {self.size} processes was lost: see its own output. Continue from the last saved "
                "state with --resume."
            ) from None

    def on_main(self, function: Callable[[], T]) -> T:
        result: list[Any] = [None]
        with self.fail_together():
            if self.is_main:
                result = [function()]
        return self._broadcast(result[0])

    def all_gather(self, value: T) -> list[T]:
        payload = _pickle(value)
        sizes = torch.empty(self.size, 1, dtype=torch.int64)
        with self._watchdog.waiting():
            self._wait(dist.all_gather, list(sizes), torch.tensor([len(payload)]))
            padded = nn.functional.pad(payload, (0, int(sizes.max()) - len(payload)))
            gathered = padded.new_empty(self.size, len(padded))
            self._wait(dist.all_gather, list(gathered), padded)
        return [_unpickle(part[:size]) for part, size in zip(gathered, sizes.flatten().tolist(), strict=True)]

    def _broadcast(self, value: T) -> T:
        """Rank 0's value."""
        payload = _pickle(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        with self._watchdog.waiting():
            self._wait(dist.broadcast, size, 0)
            if not self.is_main:
                payload = payload.new_empty(int(size))
            self._wait(dist.broadcast, payload, 0)
        result: T = value if self.is_main else _unpickle(payload)
        return result

    def _wait(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Complete a collective of the host group."""
        self._complete(collective(*arguments, group=self._host_group, async_op=True))

    def _complete(self, work: Any) -> None:
        """Wait in short pieces: inside PyTorch no signal handler runs."""
        while not work.is_completed():
            with suppress(RuntimeError):  # a timeout; a failure is raised below
                work.wait(POLL)
            self._watchdog.check()
        work.wait()

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        self._watchdog.mark()
        dist.all_reduce(tensor)
        return tensor

    def any_rank(self, level: int) -> int:
        previous, result = self._pending, 0
        if previous is not None:  # started one iteration ago, so it has completed by now
            with self._watchdog.waiting():
                self._complete(previous[0])
            result = int(previous[1])
        highest = torch.tensor(level)
        self._pending = dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._host_group, async_op=True), highest
        return result

    def ddp(self, net: nn.Module) -> nn.Module:
        self._watchdog.mark()
        wrapped: nn.Module = self._fabric.strategy.setup_module(net)
        self._watchdog.unmark()
        wrapped.register_forward_pre_hook(lambda *_: self._watchdog.mark())  # a backward pass follows, and may wait
        return wrapped

    def close(self) -> None:
        if self._pending is not None:
            with self._watchdog.waiting():
                self._complete(self._pending[0])
        self.all_gather(None)  # with heartbeats, since rank 0 may still be writing
        self._watchdog.stop_heartbeats()
        self.all_gather(None)  # none leaves, perhaps with the store, before all have stopped
        self._watchdog.close()
        # The threads of a group end with its last reference. One that still releases a tensor while the
        # interpreter shuts down would abort the process.
        self._pending = self._host_group = None
        dist.destroy_process_group()
        gc.collect()  # DDP modules are part of reference cycles and keep the default group alive


def init_distributed(device: str = "auto") -> World:
    """Connect to the other processes of the job, if there are any."""
    return connect(device) if is_launched() else SINGLE_PROCESS


def connect(device_name: str) -> DistributedWorld:
    """Connect to the other processes of the job."""
    device = resolve_device(device_name)
    if device.index is not None:
        raise UserError(f"--device {device}: the launcher assigns one device per process; use cuda or cpu.")
    # The compiled gradient of a 1x1 convolution is channels-last; DDP's copy of it costs nothing measurable.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    lightning = _import_fabric()
    logging.getLogger(lightning.__name__).setLevel(logging.WARNING)
    # Buffers are not broadcast: spectral norms evolve identically, BatchNorm's are averaged before saving.
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # the older name
    strategy = lightning.strategies.DDPStrategy(timeout=TIMEOUT, gradient_as_bucket_view=True, **{buffers: False})
    environments = lightning.plugins.environments
    with ExitStack() as cleanup:
        try:
            torchelastic = TORCHELASTIC in os.environ
            environment = environments.TorchElasticEnvironment() if torchelastic else environments.SLURMEnvironment()
            rank, size = environment.global_rank(), environment.world_size()
            watchdog = Watchdog(rank, size)
            cleanup.callback(watchdog.close)
            is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            with watchdog.connecting(environment.main_address, environment.main_port, is_host):
                fabric = lightning.Fabric(strategy=strategy, plugins=[environment], **_topology(device))
                if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched already
                    fabric.launch()
        except (ValueError, RuntimeError) as error:
            raise UserError(f"cannot connect the processes: {first_line(error)}.") from None
        cleanup.pop_all()
    return DistributedWorld(fabric, watchdog)


def _import_fabric() -> Any:
    """Lightning Fabric: its own package, or part of the package `lightning`."""
    for name in ("lightning_fabric", "lightning.fabric"):
        with suppress(ImportError):
            return importlib.import_module(name)
    return require("lightning_fabric", "distributed", "a job of several processes")


def _topology(device: torch.device) -> dict[str, Any]:
    """Accelerator, processes per node and number of nodes; `fabric run` sets them itself."""
    if "LT_CLI_USED" in os.environ:
        return {} if "LT_ACCELERATOR" in os.environ else {"accelerator": device.type}
    if TORCHELASTIC in os.environ:
        per_node, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        nodes = world_size // per_node
    else:
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
        per_node = int(os.environ[SLURM_TASKS]) // nodes
    return {"accelerator": device.type, "devices": per_node, "num_nodes": nodes}


def _pickle(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickle(payload: Tensor) -> Any:
    """What another process of this job has sent."""
    return pickle.loads(payload.numpy().data)


def wrap_ddp(trio: Trio, executors: Trio, world: World) -> Trio:
    """The executors of `trio`, with gradients averaged over all ranks if a launcher started them."""
    if not world.launched:
        return executors
    by_name = dict(executors.named_children())
    return Trio(**{name: _DDPNetwork(net, by_name[name], world) for name, net in trio.named_children()})


class _DDPNetwork(nn.Module):
    """Training passes go through DDP, which overlaps communication with the backward pass.

    A chain calls the executor directly: it has no parameter gradients to average.
    """

    def __init__(self, net: nn.Module, executor: nn.Module, world: World) -> None:
        super().__init__()
        self._executor = (executor,)  # in a tuple, so that its parameters are not registered here
        self._ddp = (world.ddp(_DDPTarget(net, executor)),)

    def forward(self, x: Tensor) -> Any:
        return (self._ddp if torch.is_grad_enabled() else self._executor)[0](x)

    @contextmanager
    def frozen(self) -> Iterator[Callable[..., Any]]:
        """See `nets.frozen.frozen`."""
        with frozen(self._executor[0]) as net:
            yield net


class _DDPTarget(nn.Module):
    """What DDP sees: the parameters of `net`, evaluated by `executor`."""

    def __init__(self, net: nn.Module, executor: nn.Module) -> None:
        super().__init__()
        self.net, self._executor = net, (executor,)

    def forward(self, x: Tensor) -> Any:
        return self._executor[0](x)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over the images of all ranks, as one process with all of them would compute it.

    Unlike torch's SyncBatchNorm it also runs on CPUs and inside a chain, where the input gradient of one
    rank depends on the images of the others.
    """

    sync = True

    def forward(self, x: Tensor) -> Tensor:
        if not (self.sync and self.training):
            return super().forward(x)
        variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        # Every rank has equally many images, so moments average. In double: variance is a difference of two.
        moments = torch.stack([mean, variance]).double()
        moments = _all_reduce_mean(torch.stack([moments[0], moments[1] + moments[0].square()]))
        mean, variance = moments[0].float(), (moments[1] - moments[0].square()).float()
        if self.track_running_stats:
            self._update_running_stats(mean.detach(), variance.detach(), x.numel() // x.shape[1])
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        count *= dist.get_world_size()
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        self.num_batches_tracked.add_(1)


def convert_sync_batchnorm(net: nn.Module) -> None:
    """Replace every BatchNorm inside `net` by a synchronised one, in place."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm2d):
                if type(child) is not nn.BatchNorm2d or not (
                    child.affine and child.track_running_stats and child.momentum is not None
                ):
                    raise UserError(
                        "engine.sync_batchnorm=true is for BatchNorm2d with weights and running statistics, not for "
                        f"{child}."
                    )
                synced = SyncBatchNorm2d(child.num_features, child.eps, child.momentum)
                synced.load_state_dict(child.state_dict())
                setattr(module, name, synced.to(child.weight.device).train(child.training))


@contextmanager
def local_batchnorm(net: nn.Module) -> Iterator[None]:
    """Suspend synchronisation, for work that not every rank takes part in."""
    synced = [m for m in net.modules() if isinstance(m, SyncBatchNorm2d) and m.sync]
    try:
        for module in synced:
            module.sync = False
        yield
    finally:
        for module in synced:
            module.sync = True


class _AllReduceMean(torch.autograd.Function):
    """The mean over all ranks; every rank's loss depends on it, so its gradient is reduced as well."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _all_reduce(x) / dist.get_world_size()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduce(gradient.contiguous()) / dist.get_world_size()


def _all_reduce(x: Tensor) -> Tensor:
    """The sum over all ranks, by a functional collective that torch.compile can trace."""
    from torch.distributed import _functional_collectives

    group = dist.group.WORLD
    assert group is not None
    return _functional_collectives.all_reduce(x, "sum", group)


_all_reduce_mean: Callable[[Tensor], Tensor] = _AllReduceMean.apply
