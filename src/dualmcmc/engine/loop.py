"""The training loop: iterations, and around them the log, the guard, the pictures and the states."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualmcmc import data, settings
from dualmcmc.config import Config, Data
from dualmcmc.data.feed import Feed
from dualmcmc.data.machine import in_words
from dualmcmc.engine import guard
from dualmcmc.engine.accelerate import Means, choose
from dualmcmc.engine.device import describe, make_repeatable, peak_memory, pick, use_threads
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.journal import Journal
from dualmcmc.engine.preview import write_preview
from dualmcmc.engine.progress import Reporter
from dualmcmc.engine.state import TrainState, read_config
from dualmcmc.engine.stop import StopSignals
from dualmcmc.errors import Diverged, UserError
from dualmcmc.files import make_folder
from dualmcmc.nets import parameter_counts

FIXED = ("seed", "data", "nets", "teaching.latent_dim", "ema")  # what a resumed run cannot change,
FREE = ("data.path", "data.test_path", "data.place", "data.workers")  # but for where the images lie


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
    engine: str  # how it was computed
    peak_memory: int  # bytes, of the GPU where there is one


def train(
    config: Config,
    out: str | Path,
    device: str | torch.device = "auto",
    resume: bool = False,
    max_images: int | None = None,
    max_minutes: float | None = None,
    reporter: Reporter | None = None,
) -> Outcome:
    """Train `config` in the folder `out` until train.images, or an earlier limit, or a signal.

    With `resume`, go on from the newest saved state, exactly where it was.
    """
    reporter = reporter or Reporter()
    config = replace(config, data=_from_anywhere(config.data))
    folder, device = RunFolder(Path(out)), pick(str(device))
    if not resume and folder.holds_a_run():
        raise UserError(f"'{out}' already holds a run: add --resume to go on with it, or choose another --out.")
    images = data.load(config.data, reporter.watch)  # first: bad input must leave nothing behind
    make_repeatable(device, config.train.deterministic)
    use_threads(config.engine.threads)
    means = choose(config.engine, device)
    state = TrainState(config, device, data.fingerprint(images.train))
    same_noise = state.load(folder.latest_state()) if resume else True
    cfg = config.data
    feed = Feed(images.train, config.seed, config.train.batch, device, cfg.place, cfg.flip, cfg.workers)
    with StopSignals() as signals:  # from the first file on
        for part in (folder.root, folder.samples, folder.states):
            make_folder(part)
        folder.remove_leftovers()
        folder.write_config(config)
        if resume:
            state.save_snapshot(folder.snapshot)  # it may have been lost
        journal = Journal(folder, state.images)
        counts = parameter_counts(state.trio)
        journal.event(
            "resume" if resume else "start",
            state.images,
            device=describe(device),
            torch=torch.__version__,
            parameters=counts,
            data=data.describe(cfg, images),
            resident=feed.resident,
            same_noise=same_noise,
            engine=means.in_words,
        )
        sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        kept = "in its memory" if feed.resident else f"streamed ({in_words(images.train.nbytes)})"
        reporter.say(
            f"{len(images.train):,} images on {describe(device)}, {kept}; {means.in_words}; parameters: {sizes}"
        )
        for note in (*images.notes, *means.notes):
            reporter.say(note)
        if not same_noise:
            reporter.say("the run moved to another kind of device: its noise starts anew, all else goes on")
        loop = _Loop(config, state, feed, folder, journal, reporter, means)
        try:
            why = loop.run(signals, max_images, max_minutes)
        finally:
            feed.close()
            journal.close()
            reporter.stop()
    done = state.images, state.iteration, state.seconds
    return Outcome(folder.root, *done, why, counts, loop.last, loop.iteration.means.in_words, peak_memory(device))


def _from_anywhere(cfg: Data) -> Data:
    """Full paths, so that a run finds its images whatever folder it is resumed from."""

    def full(path: str | None) -> str | None:
        return path and str(Path(path).expanduser().absolute())

    return replace(cfg, path=full(cfg.path), test_path=full(cfg.test_path))


def resumed_config(out: Path, overrides: list[str], preset: str | None = None) -> Config:
    """A run's own settings with changes on top; refuses those that would make it another run.

    `preset`, where the caller named one, must be the run's.
    """
    folder = RunFolder(out)
    if not folder.holds_a_run():
        raise UserError(f"there is no run to resume in '{out}': leave out --resume to start one.")
    try:
        old = read_config(folder.latest_state())  # what it was trained with, whatever config.yaml says by now
    except UserError as error:
        raise UserError(f"{error} Delete that file to go on from the state before it.") from None
    if preset is not None and settings.load_config(preset).preset != old.preset:
        raise UserError(f"the run in '{out}' is of preset '{old.preset}', not '{preset}': name that one, or none.")
    new = settings.from_tree(settings.apply_overrides(settings.to_tree(old), overrides), "the resumed run")
    before, after = _flat(old), _flat(new)
    for key in before:
        fixed = any(key == name or key.startswith(name + ".") for name in FIXED)
        if fixed and before[key] != after[key] and key not in FREE:
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
        feed: Feed,
        folder: RunFolder,
        journal: Journal,
        reporter: Reporter,
        means: Means,
    ) -> None:
        self.config, self.state, self.feed = config, state, feed
        self.folder, self.journal, self.reporter = folder, journal, reporter
        self.iteration = Iteration(config, state, feed, means)
        self.last: dict[str, float] = {}
        self._read_at, self._read_iteration = time.monotonic(), state.iteration

    def _note(self, text: str) -> None:
        """Something a person should know of the engine."""
        self.reporter.say(text)
        self.journal.event("note", self.state.images, text=text)

    def run(self, signals: StopSignals, max_images: int | None, max_minutes: float | None) -> str:
        """Iterate until something says stop; says what did."""
        cfg, state = self.config.train, self.state
        target = cfg.images if max_images is None else min(cfg.images, max_images)
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        if state.images == 0:
            self._save()  # so that a run which diverges early still has a good state
        if state.images < target:
            self.iteration.prepare(self.reporter.watch, self._note)
        self.reporter.start(state.images, target)
        self._read_at = time.monotonic()
        while state.images < target:
            self.iteration()
            self.reporter.advance(state.images, state.iteration)
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
            if save:
                self._save()
            if show:
                self.journal.picture("samples", write_preview(state, self.folder), state.images)
            if save or show:
                self._read_at = time.monotonic()  # neither counts as training time
            if why is not None:
                self.journal.event("stop", state.images, why=why)
                return why
        return "finished" if target == cfg.images else "max-images"

    def _due(self, every: int) -> bool:
        """Whether the last batch crossed a multiple of `every` images."""
        return self.state.images // every > (self.state.images - self.config.train.batch) // every

    def _read(self) -> None:
        """Wait for the device, note the numbers, stop the run if they are past all health."""
        state = self.state
        iterations = state.iteration - self._read_iteration
        record = self.iteration.window.read(iterations)
        now = time.monotonic()
        passed = now - self._read_at
        state.seconds += passed
        self._read_at, self._read_iteration = now, state.iteration
        record = {
            "iteration": state.iteration,
            "images": state.images,
            "seconds": round(state.seconds, 3),
            "iterations_per_second": iterations / passed,
            "lr_energy": state.learning_rates["energy"],
        } | record
        self.last = record
        self.journal.record(record)
        self._check(record)
        self.reporter.numbers(record)

    def _check(self, record: dict[str, float]) -> None:
        """Stop the run if its numbers are past all health."""
        try:
            guard.check(record, self.config.guard)
        except Diverged as error:
            good = self.folder.latest_state()
            self.journal.event("diverged", self.state.images, reason=str(error), last_good_state=good.name)
            raise Diverged(
                f"diverged at image {self.state.images:,}: {error}, then go on from the last good state ({good}) with: "
                f"dualmcmc train --resume --out {self.folder.root} KEY=VALUE"
            ) from None

    def _save(self) -> None:
        """The full state and the snapshot, if they are sound."""
        begun = time.monotonic()
        if self.state.images > 0:
            self._check(self.iteration.try_out())  # the numbers read so far are from before the last update
        path = self.folder.state_path(self.state.images)
        self.state.save(path)
        self.state.save_snapshot(self.folder.snapshot)
        self.folder.prune_states(self.config.train.keep)
        self.journal.event("save", self.state.images, state=path.name, seconds=round(time.monotonic() - begun, 3))
