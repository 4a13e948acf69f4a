"""The work of a task, in pixels times steps of a chain: what it uses by default on a CPU, and its progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dualmcmc.engine.distributed import World
from dualmcmc.tasks.run import Run
from dualmcmc.utils.progress import ProgressFactory

CPU_WORK = 2**22  # pixels times steps; about a minute on two cores
INCEPTION_WORK = 10 * 32**2  # of one image through Inception, whatever its size


def default_count(run: Run, available: int, steps: int) -> int:
    """How many of `available` images a command uses unless -n is given: all; on a CPU, at most `CPU_WORK` of them.

    `steps` is the work per image, in evaluations of a network.
    """
    if run.device.type != "cpu":
        return available
    return min(available, max(2, CPU_WORK // (_pixels(run) * steps)))


def reduction_note(*parts: tuple[int, int, str]) -> list[str]:
    """A note if a command uses fewer than all by default; `parts`: how many, of how many, of what."""
    reduced = [part for part in parts if part[0] < part[1]]
    if not reduced:
        return []
    text = ", ".join(f"{count:,} of {available:,} {what}" for count, available, what in reduced)
    return [f"using {text} on this CPU; -n {max(available for _, available, _ in reduced)} uses all"]


def inception_steps(run: Run) -> int:
    """The steps of a chain that take as long as one image through Inception."""
    return INCEPTION_WORK // _pixels(run)


def _pixels(run: Run) -> int:
    """Of an image; of other samples, their values."""
    shape = run.config.data.sample_shape
    return math.prod(shape[1:] if run.config.data.is_image else shape)


@contextmanager
def step_progress(
    run: Run, progress: ProgressFactory, task: str, images: int, steps: int, world: World
) -> Iterator[Callable[[float, int], None]]:
    """Progress over images that need `steps` evaluations of a network each; those of chains count by themselves.

    The others are counted by calling what is yielded, with a number of images and of evaluations. The processes share
    the images, and each counts for all.
    """
    with progress(task, images, run.config.data.noun) as advance:

        def count(part: float, evaluations: int) -> None:
            advance(part * evaluations * world.size / steps)

        with run.watch_steps(lambda part: count(part, 1)):
            yield count
