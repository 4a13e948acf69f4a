"""The two chains step by step: film strips and profiles (the paper's figure on MCMC revision), and long x-chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dualmcmc.config import Chain
from dualmcmc.langevin import Trace
from dualmcmc.metrics.chains import MIN_DRAWS, effective_sample_size, r_hat
from dualmcmc.tasks.run import Run
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, side_by_side, stacked, strip, to_uint8
from dualmcmc.utils.plots import lines, profile
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_FRAMES = 11  # of a film strip, unless the interval is given
LONG_CHAIN_ROWS = 8


@dataclass(frozen=True)
class ChainFilm:
    """A batch of chains: uint8 images (N, C, H, W) at some steps, and one value per image at every step."""

    frames: list[Tensor]
    at: list[int]  # the step of each frame; the last frame of a z-chain, the images, has none
    values: Tensor  # (steps + 1, N): energy of an x-chain, MSE of a z-chain (pixels in [-1, 1])
    caption: str  # the chain and its length
    title: str
    label: str

    def strip(self, rows: int) -> Tensor:
        """One row per image, one column per frame."""
        return _strip(self.frames, self.at, rows)

    def profile(self) -> Tensor:
        """A plot of the values over the steps."""
        return profile(self.values, self.title, self.label)

    def means(self) -> list[float]:
        """The mean over the images at each step."""
        return self.values.double().mean(1).tolist()


def trace_x(run: Run, n: int = 64, every: int | None = None, progress: ProgressFactory = no_progress) -> ChainFilm:
    """The x-chain from n generator samples, with a frame every `every` steps."""
    run.require_images("a film strip")
    run.check_one_batch(n)
    steps = run.config.sampling_chain.steps
    trace = Trace(every=_frame_interval(every, steps))
    start = run.initial_images(n, run.generator_for("prior"))
    with _progress_in_steps(run, progress, "x-chain", steps):
        run.revise_x(start, rng=run.generator_for("x-chain"), trace=trace)
    frames = [to_uint8(state).cpu() for state in trace.states]
    values, title = torch.stack(trace.potential).cpu(), "Energy along the x-chain"
    return ChainFilm(frames, trace.kept_at, values, _x_caption(run.config.sampling_chain), title, "energy")


def trace_z(run: Run, images: Tensor, every: int | None = None, progress: ProgressFactory = no_progress) -> ChainFilm:
    """The z-chain on uint8 images, from inference alone; the last frame shows the images."""
    run.require_images("a film strip")
    run.check_one_batch(len(images))
    x = from_uint8(images.to(run.device))
    steps = run.config.teaching.z_chain.steps
    trace = Trace(every=_frame_interval(every, steps))
    with _progress_in_steps(run, progress, "z-chain", steps):
        rng = run.generator_for("z-chain")
        run.revise_z(run.initial_latents(x, rng), x, rng=rng, trace=trace)
    frames = [to_uint8(run.generate(state)).cpu() for state in trace.states]
    values = torch.stack(trace.mse).cpu()
    caption = f"z-chain ({run.z_chain_settings().format_steps()})"
    title, label = "MSE along the z-chain", "MSE per pixel, [-1, 1]"
    return ChainFilm([*frames, images.cpu()], trace.kept_at, values, caption, title, label)


def picture(x: ChainFilm, z: ChainFilm, rows: int = 6) -> Tensor:
    """Film strips above their profiles: x left, z right."""
    columns = [stacked(film.strip(rows), film.profile()) for film in (x, z)]
    return side_by_side(*columns, captions=(x.caption, z.caption))


def _x_caption(chain: Chain) -> str:
    return f"x-chain ({chain.format_steps()})"


def _strip(frames: list[Tensor], at: list[int], rows: int) -> Tensor:
    """Frames with their steps above them; one without a step shows the images themselves."""
    captions = [*(f"step {step}" for step in at), "image"][: len(frames)]
    return strip(frames, rows, captions)


@contextmanager
def _progress_in_steps(run: Run, progress: ProgressFactory, task: str, steps: int) -> Iterator[None]:
    states = steps + 1  # each is evaluated, the final one for the trace
    with progress(task, states, "steps") as advance, run.watch_steps(lambda images: advance(1)):
        yield


def _frame_interval(every: int | None, steps: int) -> int:
    if every is None:
        return max(1, -(-steps // (MAX_FRAMES - 1)))
    if every < 1:
        raise UserError(f"--every must be at least 1, not {every}.")
    return every


@dataclass(frozen=True)
class LongChains:
    """The drift of long x-chains: numbers, and a picture of frames and curves."""

    numbers: dict[str, Any]
    picture: Tensor


def _finite(diagnostic: Callable[[Tensor], float], values: Tensor) -> float | None:
    """None with too few values, if one is not finite, and if those of a chain are constant."""
    value = diagnostic(values) if len(values) >= MIN_DRAWS else math.nan
    return value if math.isfinite(value) else None


def long_chains(run: Run, n: int, steps: int, progress: ProgressFactory = no_progress) -> LongChains:
    """n x-chains of `steps` steps from generator samples: energy, its mixing, displacement, pixels outside [-1, 1].

    A converged chain keeps its energy and its distance from the start. One that keeps drifting, or leaves the pixel
    range, indicates an energy that is unbounded there.
    """
    if n < 1 or steps < 1:
        raise UserError(f"long chains need at least one chain and one step, not {n} and {steps}.")
    run.require_images("'long-chains'")
    run.require("energy", "'long-chains'")
    run.check_one_batch(n)
    trace = Trace(every=_frame_interval(None, steps))
    start = run.initial_images(n, run.generator_for("prior"))
    with _progress_in_steps(run, progress, "x-chain", steps):
        end = run.revise_x(start, steps, run.generator_for("x-chain"), trace)
    energy, displacement = (torch.stack(values).double().cpu() for values in (trace.potential, trace.displacement))
    outside = [float((~(state.abs() <= 1)).double().mean()) for state in trace.states]  # NaN counts as outside
    halfway = len(energy) // 2  # the burn-in
    numbers = {
        "chains": n,
        "steps": steps,
        "finite": bool(torch.isfinite(end).all()),
        "energy_start": float(energy[0].mean()),
        "energy_halfway": float(energy[halfway].mean()),
        "energy_end": float(energy[-1].mean()),
        "effective_sample_size": _finite(effective_sample_size, energy[halfway:]),
        "r_hat": _finite(r_hat, energy[halfway:]),
        "acceptance_rate": trace.acceptance_rate,
        "displacement_rms_halfway": float(displacement[halfway].square().mean().sqrt()),
        "displacement_rms_end": float(displacement[-1].square().mean().sqrt()),
        "max_abs_pixel": float(end.abs().max()),
        "fraction_outside_range": outside[-1],
        "kept_at": trace.kept_at,
        "fraction_outside_range_at": outside,
    }
    frames = _strip([to_uint8(state).cpu() for state in trace.states], trace.kept_at, LONG_CHAIN_ROWS)
    curves = stacked(
        side_by_side(
            profile(energy, "Energy", "energy"),
            profile(displacement, "Distance from the start", "rms per pixel, [-1, 1]"),
        ),
        lines({"pixels": (trace.kept_at, outside)}, "Pixels outside [-1, 1]", "step", "fraction"),
    )
    caption = _x_caption(replace(run.config.sampling_chain, steps=steps))
    return LongChains(numbers, stacked(stacked(frames, captions=[caption]), curves))
