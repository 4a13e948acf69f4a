"""Generator samples and their EBM-revised forms, side by side; and what a long chain does to them."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.errors import UserError
from dualmcmc.files import atomic, check_target
from dualmcmc.langevin import Trace
from dualmcmc.pictures import grid, save_png, side_by_side, stacked, strip, to_uint8
from dualmcmc.plots import lines, profile
from dualmcmc.progress import Watch, quiet
from dualmcmc.tasks.run import Run, finite

MOST_IN_A_PICTURE = 10_000
FRAMES, ROWS = 11, 8  # of the film strip of a long chain


def sample(run: Run, n: int, out: Path, watch: Watch = quiet) -> dict[str, Any]:
    """Draw n samples and write them to `out`; returns mean energies and how far the chain moved.

    .png: generator samples left, revised right. .npz: bytes, (N, H, W, C), as `generator` and `revised`,
    written as they come, so that memory does not grow with n. The processes of the run's crew share the work, the
    first writes.
    """
    run.check_alike()
    with run.crew.alike():
        if run.crew.leads:
            check_target(out, ".png", ".npz")
        if n < 1:
            raise UserError(f"-n must be at least 1, not {n}.")
        if n > MOST_IN_A_PICTURE and out.suffix.lower() == ".png":
            raise UserError(f"-n {n} is too many for a picture (at most {MOST_IN_A_PICTURE}): use --out FILE.npz.")
    totals = torch.zeros(3, dtype=torch.float64)
    kept: list[tuple[Tensor, Tensor]] = []
    run.expect(n, watch)
    with ExitStack() as open_files:
        shape = (n, run.config.data.size, run.config.data.size, run.config.data.channels)
        to_npz = out.suffix.lower() == ".npz" and run.crew.leads
        add = open_files.enter_context(_npz(out, shape)) if to_npz else None
        advance = open_files.enter_context(watch("sampling", n, "images"))
        for start, revised, sums in _in_order(run, n):
            totals += sums
            if add is None:
                kept.append((start, revised))
            else:
                add(start, revised)
            advance(len(start))
    if kept:
        before, after = (grid(torch.cat(parts), max(1, round(n**0.5))) for parts in zip(*kept, strict=True))
        save_png(side_by_side(before, after), out)
    energy_generator, energy_revised, moved_square = (totals / n).tolist()
    return {
        "energy_generator": energy_generator,
        "energy_revised": energy_revised,
        "x_moved": moved_square**0.5,
        "steps": run.config.sampling_chain.steps,
    }


def _in_order(run: Run, n: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Samples as bytes, generator and revised, and sums of their energies and of how far they moved, in parts.

    The processes of the run's crew draw them side by side; the first gets all, in their order.
    """
    drawn = run.draw(n)
    left = True
    while left:
        made = None
        with run.crew.alike():
            for _, start, revised in islice(drawn, 1):
                moved = (finite(revised) - start).square().flatten(1).mean(1)
                sums = torch.stack([run.energy(start).sum(), run.energy(revised).sum(), moved.sum()]).double()
                made = to_uint8(start).cpu(), to_uint8(revised).cpu(), sums.cpu()
        parts = [part for part in run.crew.gather(made) if part is not None]
        yield from parts if run.crew.leads else ()
        left = len(parts) == run.crew.world


@contextmanager
def _npz(path: Path, shape: tuple[int, ...]) -> Iterator[Callable[[Tensor, Tensor], None]]:
    """An npz of two arrays that grow together: one goes straight into the archive, the other waits in a file."""
    with (
        atomic(path) as whole,
        tempfile.TemporaryFile(dir=path.parent) as waiting,
        zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive,
    ):
        with _member(archive, "revised", shape) as member:

            def add(generated: Tensor, revised: Tensor) -> None:
                member.write(_pixels(revised))
                waiting.write(_pixels(generated))

            yield add
        waiting.seek(0)
        with _member(archive, "generator", shape) as member:
            shutil.copyfileobj(waiting, member, 1 << 20)


@contextmanager
def _member(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        yield member


def _pixels(images: Tensor) -> bytes:
    return images.permute(0, 2, 3, 1).contiguous().numpy().tobytes()


@dataclass(frozen=True)
class LongRun:
    """What a long x-chain did: numbers over its steps, and the picture of both."""

    numbers: dict[str, Any]
    picture: Tensor


def long_run(run: Run, n: int, steps: int) -> LongRun:
    """n chains of many steps from generator samples, and how far they drift: energy, distance, range.

    A chain that has found its place keeps its energy and stops moving away from its start; one that
    drifts for ever, or leaves the range of pixels, says that the energy is unbounded there.
    """
    if n < 1 or steps < 1:
        raise UserError(f"a long run needs at least one chain and one step, not {n} and {steps}.")
    run.check_traced(n)
    trace = Trace(every=max(1, -(-steps // (FRAMES - 1))))
    start = run.generate(run.prior(n, run.stream("prior")))
    end = run.revise_x(start, steps, run.stream("x-chain"), trace)
    energy, moved = (torch.stack(values).double().cpu() for values in (trace.potential, trace.moved))
    outside = [float((~(state.abs() <= 1)).double().mean()) for state in trace.states]  # NaN is outside too
    half = len(energy) // 2
    numbers = {
        "chains": n,
        "steps": steps,
        "finite": bool(torch.isfinite(end).all()),
        "energy_start": float(energy[0].mean()),
        "energy_half": float(energy[half].mean()),
        "energy_end": float(energy[-1].mean()),
        "moved_half": float(moved[half].square().mean().sqrt()),
        "moved_end": float(moved[-1].square().mean().sqrt()),
        "largest_pixel": float(end.abs().max()),
        "outside_range": outside[-1],
        "kept_at": trace.kept_at,
        "outside_range_at": outside,
    }
    frames = strip([to_uint8(state).cpu() for state in trace.states], ROWS)
    at = trace.kept_at
    drift = stacked(
        side_by_side(profile(energy, "Energy", "energy"), profile(moved, "Distance from the start", "rms per pixel")),
        lines({"pixels": (at, outside)}, "Share of pixels outside [-1, 1]", "step", "share"),
    )
    return LongRun(numbers, stacked(frames, drift))
