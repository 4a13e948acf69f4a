"""The processes that work on one thing together: one alone, or several that a launcher started.

`torchrun`, `fabric run` and SLURM's `srun` start them; `engine/several.py` connects them. Whoever works with a crew
need not know how many it has: alone, every question is answered by oneself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # nothing heavy: the command asks for its crew before anything else
    import torch
    from torch import Tensor, nn

T = TypeVar("T")
STARTED = "TORCHELASTIC_RUN_ID"  # in the environment of what torchrun starts, and so of `fabric run`
STEP = "SLURM_STEP_NUM_TASKS"  # in the environment of what srun starts, and not of a batch script


class Crew:
    """A process alone. `rank` of `world`; the first leads: it alone writes and speaks."""

    rank, world = 0, 1
    launched = False  # by a launcher: also where it started one process only

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    @property
    def in_words(self) -> str:
        """For the log: nothing where no launcher was."""
        return ""

    def device(self, wanted: torch.device) -> torch.device:
        """Where this process computes, if `wanted` is where all do."""
        return wanted

    @contextmanager
    def alike(self) -> Iterator[None]:
        """What all do before they work together: a `UserError` in one is the end of all, and is said once.

        Nothing inside may ask the others: they may have failed already.
        """
        yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While they work together: one that is lost is `ProcessLost` in the others."""
        yield

    def from_first(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process."""
        return work()

    def gather(self, mine: T) -> list[T]:
        """What each has, in the order of their ranks."""
        return [mine]

    def sum_(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return numbers

    def agreed(self, urgency: int) -> int:
        """The highest urgency of all. It may be the one of the call before, and is the same for all."""
        return urgency

    def averaging(self, net: nn.Module) -> nn.Module:
        """`net`, whose gradients are then the mean over all processes."""
        return net

    def close(self) -> None:
        """Part in good order."""


ALONE = Crew()


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return STARTED in os.environ or int(os.environ.get(STEP) or 1) > 1


def rank_given() -> int:
    """Which of the processes that a launcher started this one is; known before they have met."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) if is_launched() else 0


def launch(device: str = "auto") -> Crew:
    """Meet the other processes, if a launcher started any; `device` says where all compute."""
    if not is_launched():
        return ALONE
    from dualmcmc.engine import several

    return several.connect(device)
