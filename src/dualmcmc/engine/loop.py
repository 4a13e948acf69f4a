"""The training loop: iterations, and around them the log, the guard, the pictures and the states."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dualmcmc import data, rng, settings
from dualmcmc.config import Config
from dualmcmc.data.order import Order
from dualmcmc.engine import guard
from dualmcmc.engine.device import describe, make_repeatable
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.journal import Journal
from dualmcmc.engine.preview import Preview
from dualmcmc.engine.progress import Reporter
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.stop import StopSignals
from dualmcmc.engine.window import Window
from dualmcmc.errors import Diverged, UserError
from dualmcmc.files import make_folder
from dualmcmc.methods.dual_mcmc import step
from dualmcmc.nets import parameter_counts
from dualmcmc.pictures import from_uint8

FIXED = ("seed", "data", "nets", "teaching.latent_dim", "ema")  # what a resumed run cannot change


@dataclass(frozen=True)
class Outcome:
    """How a call to `train` ended."""

    folder: Path
    images: int
    iterations: int
    seconds: float  # of training, over all sittings
    why: str  # finished, max-images, max-minutes, SIGINT or SIGTERM
    parameters: dict[str, int]
    last: dict[str, float]  # the newest line of the log


def train(
    config: Config,
    out: Path,
    device: torch.device,
    resume: bool = False,
    max_images: int | None = None,
    max_minutes: float | None = None,
    reporter: Reporter | None = None,
) -> Outcome:
    """Train `config` in the folder `out` until train.images, or an earlier limit, or a signal.

    With `resume`, go on from the newest saved state, exactly where it was.
    """
    reporter = reporter or Reporter()
    folder = RunFolder(out)
    if not resume and folder.holds_a_run():
        raise UserError(f"'{out}' already holds a run: add --resume to go on with it, or choose another --out.")
    images = data.load(config.data)  # first: bad input must leave nothing behind
    make_repeatable(device, config.train.deterministic)
    state = TrainState(config, device, data.fingerprint(images.train))
    pixels = images.train.to(device)
    same_noise = True
    if resume:
        same_noise = state.load(folder.latest_state())
    for part in (folder.root, folder.samples, folder.states):
        make_folder(part)
    folder.remove_leftovers()
    folder.write_config(config)
    journal = Journal(folder, state.images)
    counts = parameter_counts(state.trio)
    journal.event(
        "resume" if resume else "start",
        state.images,
        device=describe(device),
        torch=torch.__version__,
        parameters=counts,
        train_images=len(pixels),
        same_noise=same_noise,
    )
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    reporter.say(f"{len(pixels):,} images on {describe(device)}; parameters: {sizes}")
    if not same_noise:
        reporter.say("the run moved to another kind of device: its noise starts anew, all else goes on")
    loop = _Loop(config, state, pixels, folder, journal, reporter)
    try:
        why = loop.run(max_images, max_minutes)
    finally:
        journal.close()
        reporter.stop()
    return Outcome(out, state.images, state.iteration, state.seconds, why, counts, loop.last)


def resumed_config(out: Path, overrides: list[str], preset: str | None = None) -> Config:
    """A run's own settings with changes on top; refuses those that would make it another run.

    `preset`, where the caller named one, must be the run's.
    """
    folder = RunFolder(out)
    if not folder.holds_a_run():
        raise UserError(f"there is no run to resume in '{out}': leave out --resume to start one.")
    old = folder.read_config()
    if preset is not None and Path(preset).stem != old.preset:
        raise UserError(f"the run in '{out}' is of preset '{old.preset}', not '{preset}': name that one, or none.")
    new = settings.from_tree(settings.apply_overrides(settings.to_tree(old), overrides), "the resumed run")
    before, after = _flat(old), _flat(new)
    for key in before:
        fixed = any(key == name or key.startswith(name + ".") for name in FIXED)
        if fixed and before[key] != after[key] and key not in ("data.path", "data.test_path"):
            raise UserError(
                f"a resumed run cannot change {key} (it is {before[key]}, you asked for {after[key]}): start a new run."
            )
    return new


def _flat(config: Config) -> dict[str, object]:
    def value(key: str) -> object:
        node: object = config
        for part in key.split("."):
            node = getattr(node, part)
        return node

    return {key: value(key) for key in settings.setting_names()}


class _Loop:
    """One sitting of training."""

    def __init__(
        self,
        config: Config,
        state: TrainState,
        pixels: torch.Tensor,
        folder: RunFolder,
        journal: Journal,
        reporter: Reporter,
    ) -> None:
        self.config, self.state, self.pixels = config, state, pixels
        self.folder, self.journal, self.reporter = folder, journal, reporter
        self.order = Order(len(pixels), rng.derive(config.seed, 2))
        self.preview = Preview(config, state, folder)
        self.window = Window()
        self.last: dict[str, float] = {}
        self._unproven: Path | None = None  # a state from which no iteration has been seen to be sound
        self._read_at, self._read_iteration = time.monotonic(), state.iteration

    def run(self, max_images: int | None, max_minutes: float | None) -> str:
        """Iterate until something says stop; says what did."""
        cfg, state = self.config.train, self.state
        target = cfg.images if max_images is None else min(cfg.images, max_images)
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        if state.images == 0:
            self._save()  # so that a run which diverges early still has a good state
        self.reporter.start(state.images, target)
        self._read_at = time.monotonic()
        with StopSignals() as signals:
            while state.images < target:
                self._iterate()
                why = None
                if state.images >= target:
                    why = "finished" if target == cfg.images else "max-images"
                elif signals.received is not None:
                    why = signals.received.name
                elif deadline is not None and time.monotonic() >= deadline:
                    why = "max-minutes"
                save = why is not None or self._due(cfg.save_every)
                show = why is not None or self._due(cfg.sample_every)
                if save or show or state.iteration % cfg.log_every == 0:
                    self._read()
                if show:
                    self.journal.picture("samples", self.preview.write(), state.images)
                if save:
                    self._save()
                if save or show:
                    self._read_at = time.monotonic()  # neither counts as training time
                if why is not None:
                    self.journal.event("stop", state.images, why=why)
                    return why
        return "finished" if target == cfg.images else "max-images"

    def _iterate(self) -> None:
        """One iteration; waits for nothing."""
        state, batch = self.state, self.config.train.batch
        state.set_learning_rates(state.images // len(self.pixels))
        chosen = self.order.indices(state.images, batch).to(self.pixels.device, non_blocking=True)
        x = from_uint8(self.pixels[chosen])
        self.window.add(step(state.trio, state.optimizers, x, state.rng, self.config.teaching))
        state.iteration += 1
        state.images += batch
        state.ema.update(state.images, batch)
        self.reporter.advance(state.images, state.iteration)

    def _due(self, every: int) -> bool:
        """Whether the last batch crossed a multiple of `every` images."""
        return self.state.images // every > (self.state.images - self.config.train.batch) // every

    def _read(self) -> None:
        """Wait for the device, note the numbers, stop the run if they are past all health."""
        state = self.state
        record = self.window.read()
        now = time.monotonic()
        iterations, passed = state.iteration - self._read_iteration, now - self._read_at
        state.seconds += passed
        self._read_at, self._read_iteration = now, state.iteration
        record = {
            "iteration": state.iteration,
            "images": state.images,
            "seconds": round(state.seconds, 3),
            "iterations_per_second": iterations / passed,
            "lr_energy": state.optimizers.energy.param_groups[0]["lr"],
        } | record
        self.last = record
        self.journal.record(record)
        try:
            guard.check(record, self.config.guard)
        except Diverged as error:
            if self._unproven is not None:  # its last update may be the one that broke the run
                self._unproven.unlink(missing_ok=True)
            good = self.folder.latest_state()
            self.journal.event("diverged", state.images, reason=str(error), last_good_state=good.name)
            raise Diverged(
                f"diverged at image {state.images:,}: {error}, then go on from the last good state ({good}) with: "
                f"dualmcmc train --resume --out {self.folder.root} KEY=VALUE"
            ) from None
        self._unproven = None
        self.reporter.numbers(record)

    def _save(self) -> None:
        """The full state and the snapshot."""
        begun = time.monotonic()
        path = self.folder.state_path(self.state.images)
        self.state.save(path)
        self._unproven = path if self.state.images > 0 else None  # initial weights need no proof
        self.state.save_snapshot(self.folder.snapshot)
        self.folder.prune_states(self.config.train.keep)
        self.journal.event("save", self.state.images, state=path.name, seconds=round(time.monotonic() - begun, 3))
