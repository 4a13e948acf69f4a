"""The two chains as films: images at every few steps, and a number at each (the paper's figure on MCMC revision)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dualmcmc.errors import UserError
from dualmcmc.langevin import Trace
from dualmcmc.pictures import from_uint8, side_by_side, stacked, strip, to_uint8
from dualmcmc.plots import profile
from dualmcmc.tasks.run import Run

MOST_FRAMES = 11  # where the distance between frames is not given


@dataclass(frozen=True)
class Film:
    """What a chain did to a batch: byte images (N, C, H, W) at some steps, and a number an image at all steps."""

    frames: list[Tensor]
    at: list[int]  # the step of each frame; for z the originals come after the last
    values: Tensor  # (steps + 1, N): energy for x, MSE in [-1, 1] for z
    title: str
    label: str

    def strip(self, rows: int) -> Tensor:
        """One row an image, one column a frame."""
        return strip(self.frames, rows)

    def profile(self) -> Tensor:
        """The mean over the images at each step."""
        return profile(self.values, self.title, self.label)

    def means(self) -> list[float]:
        """The same as numbers."""
        return self.values.double().mean(1).tolist()


def film_x(run: Run, n: int = 64, every: int | None = None) -> Film:
    """The x-chain from n generator samples."""
    run.check_traced(n)
    trace = Trace(every=_every(every, run.config.sampling_chain.steps))
    run.revise_x(run.generate(run.prior(n, run.stream("prior"))), rng=run.stream("x-chain"), trace=trace)
    frames = [to_uint8(state).cpu() for state in trace.states]
    return Film(frames, trace.kept_at, torch.stack(trace.potential).cpu(), "Energy over the x-chain", "energy")


def film_z(run: Run, images: Tensor, every: int | None = None) -> Film:
    """The z-chain on byte images, from inference alone; the originals are the last frame."""
    run.check_traced(len(images))
    x = from_uint8(images.to(run.device))
    trace = Trace(every=_every(every, run.config.teaching.z_chain.steps))
    run.revise_z(run.infer(x).mean, x, rng=run.stream("z-chain"), trace=trace)
    frames = [to_uint8(run.generate(state)).cpu() for state in trace.states]
    values = torch.stack(trace.mse).cpu()
    return Film([*frames, images.cpu()], trace.kept_at, values, "MSE over the z-chain", "MSE per pixel, [-1, 1]")


def picture(x: Film, z: Film | None, rows: int = 6) -> Tensor:
    """Film strips above their profiles: x left, z right."""
    return side_by_side(*(stacked(film.strip(rows), film.profile()) for film in (x, z) if film is not None))


def _every(every: int | None, steps: int) -> int:
    if every is None:
        return max(1, -(-steps // (MOST_FRAMES - 1)))
    if every < 1:
        raise UserError(f"--every must be at least 1, not {every}.")
    return every
