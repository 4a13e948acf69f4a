"""What a run records while it trains: JSON lines, which it forwards to the trackers, and sample grids."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.engine.ddp import local_batchnorm
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.trackers import Summary
from dualmcmc.engine.tracking import Trackers
from dualmcmc.langevin import revise_x
from dualmcmc.nets.frozen import eval_mode
from dualmcmc.utils.errors import CannotWrite
from dualmcmc.utils.files import read_text, to_json, write_text
from dualmcmc.utils.images import before_and_after, save_png, to_uint8

PREVIEW_COUNT, PREVIEW_COLUMNS = 64, 8
MAX_LOG = 1 << 30  # bytes; a line has about 500
RENAMED = {  # since earlier versions
    "x_moved": "x_displacement_rms",
    "z_moved": "z_displacement_rms",
    "lowered": "reduced",
    "why": "reason",
    "last_good_state": "last_valid_state",
}


class RunLog:
    """Appends to log.jsonl, and forwards to the trackers.

    When a run resumes at `images`, later lines are dropped: that work is done again. As a context manager it closes the
    trackers' runs as finished, or as failed if there is an exception.
    """

    def __init__(self, folder: RunFolder, images: int, trackers: Trackers | None = None) -> None:
        self._folder = folder
        self._trackers = trackers or Trackers([])
        self._open(images)

    def _open(self, images: int) -> None:
        folder = self._folder
        if folder.log.exists():
            kept = [line for line in read_log(folder.log) if line["images"] <= images]
            write_text(folder.log, "".join(to_json(entry) + "\n" for entry in kept))
        with _writing(folder.root):
            self._file = open(folder.log, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(kind is not None)

    def rewind(self, images: int) -> None:
        """Drop everything after `images`: the run was rolled back to this point."""
        self._close_file()
        self._open(images)
        self._trackers.send(lambda tracker: tracker.rewind(images))

    def event(self, kind: str, images: int, **facts: Any) -> None:
        """Record an event: start, resume, note, save, stop, diverged or rollback."""
        self._write({"kind": kind, "images": images, "time": round(time.time(), 3), **facts})
        if summary := _summarize(kind, images, facts):
            self._trackers.send(lambda tracker: tracker.summary(summary))
        for text in self._trackers.drop_failed():
            self.event("note", images, text=text)

    def stats(self, values: dict[str, float]) -> None:
        """Record the statistics of one log interval; `images` among them is the x-axis."""
        images = int(values["images"])
        self._write({"kind": "train", **values})
        self._trackers.send(lambda tracker: tracker.stats(values, images))
        for text in self._trackers.drop_failed():
            self.event("note", images, text=text)

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """Show a (C, h, w) uint8 image in the trackers."""
        self._trackers.send(lambda tracker: tracker.image(name, pixels, images))

    def close(self, failed: bool = False) -> None:
        """Flush and close, ignoring write errors; `failed`: the session was ended by an error."""
        self._close_file()
        self._trackers.close(failed)

    def _close_file(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        with _writing(self._folder.log):
            self._file.write(to_json(entry) + "\n")
            self._file.flush()


class NullLog(RunLog):
    """The log of every rank but 0: records nothing."""

    def __init__(self) -> None:
        pass

    def event(self, kind: str, images: int, **facts: Any) -> None:
        """Do nothing."""

    def stats(self, values: dict[str, float]) -> None:
        """Do nothing."""

    def image(self, name: str, pixels: Tensor, images: int) -> None:
        """Do nothing."""

    def close(self, failed: bool = False) -> None:
        """Do nothing."""


def _summarize(kind: str, images: int, facts: dict[str, Any]) -> Summary:
    """What trackers show of an event as facts about the run."""
    if kind == "stop":
        return {"stop_reason": facts.get("reason", "")}
    if kind == "diverged":
        return {"diverged_at": images, "divergence": facts.get("reason", "")}
    if kind == "rollback":
        return {"rollbacks": facts.get("number", 0)}
    return {}


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None


def read_log(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, with current names; malformed lines, such as a truncated last one, are skipped."""
    entries = []
    if path.exists():
        for line in read_text(path, MAX_LOG).splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("images"), int):
                entries.append({RENAMED.get(str(name), str(name)): value for name, value in entry.items()})
    return entries


def write_preview(state: TrainState, folder: RunFolder) -> Tensor:
    """Save generator samples and the same after the x-chain as samples/IMAGES.png.

    Without a generator the x-chain starts from uniform noise; without an energy there is none. Uses the same latents
    every time and draws nothing from the run's generator. Returns the (C, h, w) picture.
    """
    config = state.config
    generator = rng.make_generator(rng.derive_seed(config.seed, rng.Stream.PREVIEW), state.device)
    trio = state.ema.sampling_trio()
    with eval_mode(trio, config.sampling.batchnorm), local_batchnorm(trio):  # only rank 0 draws it
        if trio.generator is None:
            like = torch.empty(PREVIEW_COUNT, *config.data.sample_shape, device=state.device)
            x = rng.uniform_like(like, generator)
        else:
            z = torch.randn(PREVIEW_COUNT, config.teaching.latent_dim, device=state.device, generator=generator)
            if (prior := state.prior()) is not None:
                z = prior.transform(z)
            with torch.no_grad():
                x = trio.generator(z)
        revised = x if trio.energy is None else revise_x(trio.energy, x, config.sampling_chain, generator)
    before = None if trio.generator is None else to_uint8(x).cpu()
    after = None if trio.energy is None else to_uint8(revised).cpu()
    picture = before_and_after(before, after, PREVIEW_COLUMNS, config.sampling_chain.format_steps())
    save_png(picture, folder.samples / f"{state.images:012d}.png")
    return picture
