"""The processes of one job: a single one, or several started by torchrun, `fabric run` or SLURM.

Code that may run distributed takes a `World`. `SINGLE_PROCESS` answers every collective locally;
`engine/ddp.py` implements the same interface on top of torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # keeps torch out of the command's start-up
    import torch
    from torch import Tensor, nn

T = TypeVar("T")
TORCHELASTIC = "TORCHELASTIC_RUN_ID"  # set by torchrun, and so by `fabric run`
SLURM_TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun, but not in a batch script


class World:
    """The interface, and its implementation for a single process."""

    rank, size = 0, 1
    launched = False  # by a distributed launcher, even if it started only one process

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only process that writes files and prints."""
        return self.rank == 0

    @property
    def summary(self) -> str:
        """Processes and machines, for the log; empty without a launcher."""
        return ""

    def device(self, requested: torch.device) -> torch.device:
        """The device of this rank, given the one requested for the job."""
        return requested

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """A `UserError` on any rank ends all of them, and rank 0 reports it.

        The block must not contain collectives: a rank that has failed would not take part in them.
        """
        yield

    @contextmanager
    def detect_lost_process(self) -> Iterator[None]:
        """Turn the failure of a collective into `ProcessLost`."""
        yield

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on rank 0 and return its result on every rank."""
        return function()

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        return [value]

    def all_gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, those of rank 0 first; each has equally many."""
        if self.size == 1:
            return rows
        parts = rows.new_zeros(self.size, *rows.shape)
        parts[self.rank] = rows
        return self.all_reduce_(parts).flatten(0, 1)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        return tensor

    def any_rank(self, level: int) -> int:
        """The highest level of any rank, one call late, so that no rank waits; identical on all ranks."""
        return level

    def ddp(self, net: nn.Module) -> nn.Module:
        """`net` with gradients averaged over all ranks."""
        return net

    def close(self) -> None:
        """Leave the process group."""


SINGLE_PROCESS = World()


def is_launched() -> bool:
    """Whether a distributed launcher started this process."""
    return TORCHELASTIC in os.environ or int(os.environ.get(SLURM_TASKS) or 1) > 1


def env_rank() -> int:
    """The rank assigned by the launcher; available before the processes are connected."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) if is_launched() else 0
