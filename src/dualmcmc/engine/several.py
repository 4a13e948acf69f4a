"""Several processes that work together, connected by Lightning Fabric over torch.distributed.

Fabric finds out which of them this one is and gives it a device, whoever launched them.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dualmcmc.crew import STARTED, STEP, Crew, T
from dualmcmc.engine.device import pick
from dualmcmc.errors import ProcessLost, UserError, first_line

PATIENCE = timedelta(hours=2)  # with the others: the first may be packing a large set


class Several(Crew):
    """One of several processes, connected through torch.distributed.

    What the device holds goes over the default group (NCCL on GPUs); all else, and the question who is still there,
    over a group of the hosts (gloo), which does not make a GPU wait.
    """

    launched = True

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self._hosts: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._asked: tuple[Any, Tensor] | None = None
        self._machines = len(set(self.gather(socket.gethostname())))

    @property
    def in_words(self) -> str:
        if self.world == 1:
            return "1 process"
        return f"{self.world} processes on {self._machines} machine{'s' * (self._machines > 1)}"

    def device(self, wanted: torch.device) -> torch.device:
        found: torch.device = self._fabric.device
        return found

    @contextmanager
    def alike(self) -> Iterator[None]:
        failure: str | None = None
        with self.watching():
            try:
                yield
            except UserError as error:
                failure = str(error)
            self._fail_together(self.gather(failure))

    def _fail_together(self, failures: list[str | None]) -> None:
        """One line, from the first process: whose failure it is, unless it is its own."""
        found = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        if not found:
            return
        rank, text = found[0]
        if not self.leads:
            raise SystemExit(2)
        raise UserError(text if rank == 0 else f"process {rank} of {self.world}: {text}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Connection"))
            if not lost or self.world == 1:
                raise
            raise ProcessLost(
                f"another of the {self.world} processes is lost: see what it said. Training goes on from the last "
                "saved state with --resume."
            ) from None

    def from_first(self, work: Callable[[], T]) -> T:
        made: list[Any] = [None]
        with self.alike():
            if self.leads:
                made = [work()]
        dist.broadcast_object_list(made, 0, group=self._hosts)
        return made[0]

    def gather(self, mine: T) -> list[T]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._hosts)
        return found

    def sum_(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers

    def agreed(self, urgency: int) -> int:
        before, answer = self._asked, 0
        if before is not None:  # asked an iteration ago: it has come in meanwhile
            before[0].wait()
            answer = int(before[1])
        mine = torch.tensor(urgency)
        self._asked = dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._hosts, async_op=True), mine
        return answer

    def averaging(self, net: nn.Module) -> nn.Module:
        shared: nn.Module = self._fabric.strategy.setup_module(net)
        return shared

    def close(self) -> None:
        if self._asked is not None:
            self._asked[0].wait()
        # A group's threads end with the last reference to it. One that is still letting go of a tensor when the
        # interpreter shuts down would abort the process.
        self._asked = self._hosts = None
        dist.destroy_process_group()
        gc.collect()  # networks that averaged are held in circles, and hold the default group


def connect(device_name: str) -> Several:
    """Meet the other processes that a launcher started."""
    device = pick(device_name)
    if device.index is not None:
        raise UserError(f"--device {device}: a launcher gives each process its own; name cuda or cpu.")
    # A compiled gradient of a 1x1 convolution has its channels last, and costs DDP a copy that no clock notices.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    lightning = _lightning()
    logging.getLogger(lightning.__name__).setLevel(logging.WARNING)
    # Buffers are not broadcast: spectral norms are worked out alike everywhere, BatchNorm's are averaged when saved.
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its older name
    strategy = lightning.strategies.DDPStrategy(timeout=PATIENCE, gradient_as_bucket_view=True, **{buffers: False})
    try:
        fabric = lightning.Fabric(strategy=strategy, **_places(device))
        if "LT_CLI_USED" not in os.environ:  # `fabric run` has done it
            fabric.launch()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the processes cannot be connected: {first_line(error)}.") from None
    return Several(fabric)


def _lightning() -> Any:
    """Lightning Fabric: a package of its own, or part of the package `lightning`."""
    try:
        return importlib.import_module("lightning_fabric")
    except ImportError:
        return importlib.import_module("lightning.fabric")


def _places(device: torch.device) -> dict[str, Any]:
    """What to compute on, processes a machine, and machines; `fabric run` has told Fabric already."""
    if "LT_CLI_USED" in os.environ:
        return {} if "LT_ACCELERATOR" in os.environ else {"accelerator": device.type}
    if STARTED in os.environ:
        each, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        nodes = world // each
    else:
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)
        each = int(os.environ[STEP]) // nodes
    return {"accelerator": device.type, "devices": each, "num_nodes": nodes}
