"""Generator samples and the same after the EBM's x-chain, as a picture or as pixels."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.tasks.work import step_progress
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import atomic, check_output
from dualmcmc.utils.images import before_and_after, save_png, to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_IN_PICTURE = 10_000


def sample(run: Run, n: int, out: Path, progress: ProgressFactory = no_progress) -> dict[str, Any]:
    """Draw n samples and write them to `out`; returns mean energies and the displacement by the x-chain, if any.

    .png: generator samples and revised ones, with captions. .npz: uint8 arrays `generator` and `revised` (N, H, W, C),
    written batch by batch, so that memory does not grow with n. All processes draw, rank 0 writes. A method without a
    generator starts at noise, and one without an energy revises nothing: a picture then shows its samples alone, and
    in an .npz the array `revised` contains them.
    """
    run.require_images("'sample'")
    run.check_same_weights()
    channels, height, width = run.config.data.sample_shape
    with run.world.fail_together():
        if run.world.is_main:
            check_output(out, ".png", ".npz")
        if n < 1:
            raise UserError(f"-n must be at least 1, not {n}.")
        if n > MAX_IN_PICTURE and out.suffix.lower() == ".png":
            raise UserError(f"-n {n} is too many for a picture (at most {MAX_IN_PICTURE:,}): use --out FILE.npz.")
        if run.world.is_main and out.suffix.lower() == ".npz":
            _check_space(out, 3 * n * channels * height * width)  # one array is written twice
    totals = torch.zeros(3, dtype=torch.float64)
    kept: list[tuple[Tensor, Tensor]] = []
    run.prepare(n, progress)
    with ExitStack() as stack:
        shape = (n, height, width, channels)
        to_npz = out.suffix.lower() == ".npz" and run.world.is_main
        add = stack.enter_context(_npz_writer(out, shape)) if to_npz else None
        work = run.config.sampling_chain.steps + 1  # per image
        count = stack.enter_context(step_progress(run, progress, "sampling", n, work, run.world))
        for start, revised, sums in _gathered_batches(run, n):
            totals += sums
            if add is None:
                kept.append((start, revised))
            else:
                add(start, revised)
            count(len(start) / run.world.size, 1)  # here are the batches of all
    if kept:
        before, after = (torch.cat(parts) for parts in zip(*kept, strict=True))
        steps = run.config.sampling_chain.format_steps()
        shown = before if run.has("generator") else None, after if run.has("energy") else None
        save_png(before_and_after(*shown, max(1, round(n**0.5)), steps), out)
    if not run.has("energy"):
        return {}
    energy_generator, energy_revised, squared_displacement = (totals / n).tolist()
    return {
        "energy_generator": energy_generator,
        "energy_revised": energy_revised,
        "x_displacement_rms": squared_displacement**0.5,
        "steps": run.config.sampling_chain.steps,
    }


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise UserError(f"'{out}' needs {needed / 1e9:,.1f} GB of disk, {free / 1e9:,.1f} GB are free: lower -n.")


def _gathered_batches(run: Run, n: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of all processes, in order, on rank 0; the other ranks take part and yield nothing.

    Each is: generator samples and revised samples as uint8, and the sums of both energies and of the squared
    displacement.
    """
    local = run.sample_batches(n)
    more = True
    while more:
        batch = None
        with run.world.fail_together():
            for _, start, revised in islice(local, 1):
                squared = (require_finite(revised) - start).square().flatten(1).mean(1)
                sums = torch.zeros(3).double()
                if run.has("energy"):
                    sums = torch.stack([run.energy(start).sum(), run.energy(revised).sum(), squared.sum()]).double()
                batch = to_uint8(start).cpu(), to_uint8(revised).cpu(), sums.cpu()
        gathered = [one for one in run.world.all_gather(batch) if one is not None]
        yield from gathered if run.world.is_main else ()
        more = len(gathered) == run.world.size


@contextmanager
def _npz_writer(path: Path, shape: tuple[int, ...]) -> Iterator[Callable[[Tensor, Tensor], None]]:
    """Write two arrays batch by batch: one directly into the archive, the other through a temporary file."""
    with (
        atomic(path) as temporary,
        tempfile.TemporaryFile(dir=path.parent) as buffer,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        with _npy_member(archive, "revised", shape) as member:

            def add(generated: Tensor, revised: Tensor) -> None:
                member.write(_pixels(revised))
                buffer.write(_pixels(generated))

            yield add
        buffer.seek(0)
        with _npy_member(archive, "generator", shape) as member:
            shutil.copyfileobj(buffer, member, 1 << 20)


@contextmanager
def _npy_member(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.uint8)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        yield member


def _pixels(images: Tensor) -> bytes:
    """(N, C, H, W) as the bytes of (N, H, W, C)."""
    return images.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
