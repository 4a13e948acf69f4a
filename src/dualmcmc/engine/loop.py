"""The training loop: iterations, and around them the log, the guard, the pictures and the states."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualmcmc import data, settings
from dualmcmc.config import Config, Data
from dualmcmc.crew import ALONE, Crew
from dualmcmc.data.feed import Feed
from dualmcmc.data.machine import in_words
from dualmcmc.engine import guard
from dualmcmc.engine.accelerate import Means, choose
from dualmcmc.engine.device import describe, make_repeatable, peak_memory, pick, use_threads
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.journal import Journal, Silent
from dualmcmc.engine.lock import RunLock
from dualmcmc.engine.preview import write_preview
from dualmcmc.engine.progress import Reporter
from dualmcmc.engine.state import TrainState, check_size, newest_sound, read_config
from dualmcmc.engine.stop import Stopped, StopSignals
from dualmcmc.errors import CannotWrite, Diverged, UserError
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
    processes: int
    peak_memory: int  # bytes, of the GPU where there is one


def train(
    config: Config,
    out: str | Path,
    device: str | torch.device = "auto",
    resume: bool = False,
    max_images: int | None = None,
    max_minutes: float | None = None,
    reporter: Reporter | None = None,
    crew: Crew = ALONE,
) -> Outcome:
    """Train `config` in the folder `out` until train.images, or an earlier limit, or a signal.

    With `resume`, go on from the newest saved state that is sound, exactly where it was. With a `crew` of several
    processes (`dualmcmc.crew.launch`) each calls this; the first one alone writes and speaks.
    """
    said = reporter if reporter is not None and crew.leads else Reporter()
    folder = RunFolder(Path(out))
    try:
        with crew.watching(), ExitStack() as held:
            return _train(config, folder, str(device), resume, max_images, max_minutes, said, crew, held)
    except CannotWrite as error:
        if not folder.holds_a_run():
            raise
        raise CannotWrite(f"{error} Put that right, then --resume goes on from the last saved state.") from None


def _train(
    config: Config,
    folder: RunFolder,
    device_name: str,
    resume: bool,
    max_images: int | None,
    max_minutes: float | None,
    reporter: Reporter,
    crew: Crew,
    held: ExitStack,  # what is let go of in the end, however it ends
) -> Outcome:
    with crew.alike():  # first: bad input must leave nothing behind
        device = crew.device(pick(device_name))
        config = replace(config, data=_from_anywhere(config.data))
        if config.train.batch % crew.world:
            raise UserError(
                f"train.batch={config.train.batch} cannot be shared evenly by {crew.world} processes: "
                f"take a multiple of {crew.world}."
            )
        if crew.leads:
            _check_target(folder, resume, held)
            images = data.load(config.data, reporter.watch)
    with crew.alike():
        if not crew.leads:  # after the first, which may have had files to write for it
            images = data.load(config.data)
        make_repeatable(device, config.train.deterministic)
        use_threads(config.engine.threads)
        means = choose(config.engine, device)
        fingerprint = data.fingerprint(images.train)
        state = TrainState(config, device, fingerprint, crew)
    seen = crew.gather(fingerprint)
    with crew.alike():
        if len(set(seen)) > 1:
            raise UserError("the processes see different images: data.path must lead to the same on every machine.")
    same_noise, damaged = _restore(state, folder) if resume else (True, [])
    with crew.alike():
        cfg, batch = config.data, config.train.batch
        feed = Feed(images.train, config.seed, batch, device, cfg.place, cfg.flip, cfg.workers, crew.rank, crew.world)
    held.callback(feed.close)
    signals = held.enter_context(StopSignals(insistent=not crew.launched))  # from the first file on
    with crew.alike():
        journal = _begin(config, state, folder, resume, damaged, held) if crew.leads else Silent()
    held.callback(journal.close)
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
        processes=crew.world,
    )
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    kept = "in its memory" if feed.resident else f"streamed ({in_words(images.train.nbytes)})"
    where = f"{describe(device)}, {crew.in_words}" if crew.launched else describe(device)
    reporter.say(f"{len(images.train):,} images on {where}, {kept}; {means.in_words}; parameters: {sizes}")
    for note in (*images.notes, *means.notes):
        reporter.say(note)
    for path in damaged:
        text = f"'{path}' is damaged: going on from the state before it, at image {state.images:,}"
        reporter.say(text)
        journal.event("note", state.images, text=text)
    if not same_noise:
        reporter.say("the run moved to another kind of device: its noise starts anew, all else goes on")
    loop = _Loop(config, state, feed, folder, journal, reporter, means)
    held.callback(reporter.stop)
    why = loop.run(signals, max_images, max_minutes)
    done = state.images, state.iteration, state.seconds
    engine, memory = loop.iteration.means.in_words, peak_memory(device)
    return Outcome(folder.root, *done, why, counts, loop.last, engine, crew.world, memory)


def _check_target(folder: RunFolder, resume: bool, held: ExitStack) -> None:
    """Whether there is a run where there must be one, or none where there must be none; a run is locked."""
    if folder.holds_a_run():
        if not resume:
            raise UserError(
                f"'{folder.root}' already holds a run: add --resume to go on with it, or choose another --out."
            )
        make_folder(folder.root)  # says it where nothing can be written
        held.enter_context(RunLock(folder.lock))
    elif resume:
        raise UserError(f"there is no run to resume in '{folder.root}': leave out --resume to start one.")


def _begin(
    config: Config, state: TrainState, folder: RunFolder, resume: bool, damaged: list[Path], held: ExitStack
) -> Journal:
    """The first files of a sitting."""
    for part in (folder.root, folder.samples, folder.states):
        make_folder(part)
    if not resume:
        held.enter_context(RunLock(folder.lock))
        _check_target(folder, resume, held)  # again: another process may have been quicker
    folder.remove_leftovers()
    for path in damaged:
        folder.set_aside(path)
    folder.write_config(config)
    if resume:
        state.save_snapshot(folder.snapshot)  # it may have been lost
    return Journal(folder, state.images)


def _restore(state: TrainState, folder: RunFolder) -> tuple[bool, list[Path]]:
    """Go back to the newest sound state: whether its noise goes on, and the states that are damaged."""
    path, damaged = state.crew.from_first(lambda: newest_sound(folder))
    return state.load(path), damaged


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
    with RunLock(folder.lock):  # a run in training replaces its states as we look
        state = newest_sound(folder)[0]
        old = read_config(state)  # what it was trained with, whatever config.yaml says by now
        check_size(old, state)
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


URGENCY = ["", "max-minutes", "SIGINT", "SIGTERM"]  # reasons to stop early, the most urgent last


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
        self.config, self.state, self.feed, self.crew = config, state, feed, state.crew
        self.folder, self.journal, self.reporter = folder, journal, reporter
        self.iteration = Iteration(config, state, feed, means, state.crew)
        self.last: dict[str, float] = {}
        self._read_at, self._read_iteration = time.monotonic(), state.iteration
        self._trial_seconds = self._save_seconds = 0.0  # that these took the last time

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
        stopped = 0
        try:
            with signals.nothing_to_save():
                if state.images < target:
                    self.iteration.prepare(self.reporter.watch, self._note)
        except Stopped:
            stopped = self._urgency(signals, None)
        if why := URGENCY[max(self.crew.gather(stopped))]:
            return self._stop(why)
        self.reporter.start(state.images, target)
        self._read_at = time.monotonic()
        while state.images < target:
            self.iteration()
            self.reporter.advance(state.images, state.iteration)
            why = URGENCY[self.crew.agreed(self._urgency(signals, deadline))]
            if state.images >= target:
                why = "finished" if target == cfg.images else "max-images"
            try:
                self._look_after(why, signals)
            except Diverged as error:
                self._roll_back(error)
                continue
            if why:
                return self._stop(why)
        return "finished" if target == cfg.images else "max-images"

    def _urgency(self, signals: StopSignals, deadline: float | None) -> int:
        """How urgently this process wants to stop."""
        if signals.received is not None:
            return URGENCY.index(signals.received.name)
        return int(deadline is not None and time.monotonic() >= deadline)

    def _stop(self, why: str) -> str:
        self.journal.event("stop", self.state.images, why=why)
        return why

    def _look_after(self, why: str, signals: StopSignals) -> None:
        """What is due after an iteration: the numbers, the state, the pictures. `why`: the sitting ends here."""
        cfg, state = self.config.train, self.state
        hurry = why == "SIGTERM"
        save = bool(why) or self._due(cfg.save_every)
        show = (bool(why) and not hurry) or self._due(cfg.sample_every)
        if save or show or state.iteration % cfg.log_every == 0:
            self._read()
        if save:
            needed = signals.seconds_ago + self._trial_seconds + 2 * self._save_seconds
            self._save(try_out=not hurry or self.crew.from_first(lambda: needed < cfg.grace))
        if show and not hurry and self.crew.leads:
            self.journal.picture("samples", write_preview(state, self.folder), state.images)
        if save or show:
            self._read_at = time.monotonic()  # neither counts as training time

    def _due(self, every: int) -> bool:
        """Whether the last batch crossed a multiple of `every` images."""
        return self.state.images // every > (self.state.images - self.config.train.batch) // every

    def _read(self) -> None:
        """Wait for the device, note the numbers, stop the run if they are past all health."""
        state = self.state
        iterations = state.iteration - self._read_iteration
        record = self.iteration.window.read(iterations, self.crew)
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
        guard.check(record, self.config.guard)
        self.reporter.numbers(record)

    def _save(self, try_out: bool = True) -> None:
        """The full state and the snapshot, if they are sound."""
        begun = time.monotonic()
        if self.state.images > 0 and try_out:
            # the numbers read so far are from before the last update
            guard.check(self.iteration.try_out(), self.config.guard)
            self._trial_seconds = time.monotonic() - begun
        tried = time.monotonic()
        if not try_out and any(self.crew.gather(not self.state.is_finite())):
            raise Diverged(f"a weight is not finite. {guard.ADVICE}")
        self.state.settle()
        if self.crew.leads:
            path = self.folder.state_path(self.state.images)
            self.state.save(path)
            self.state.save_snapshot(self.folder.snapshot)
            self.folder.prune_states(self.config.train.keep)
            seconds = time.monotonic() - begun
            self.journal.event("save", self.state.images, state=path.name, seconds=round(seconds, 3))
        self._save_seconds = time.monotonic() - tried

    def _roll_back(self, error: Diverged) -> None:
        """Go back to the last good state with gentler settings, if that was asked for and may still help."""
        state, cfg, at = self.state, self.config.guard, self.state.images
        good, damaged = self.crew.from_first(lambda: newest_sound(self.folder))
        self.journal.event("diverged", at, reason=str(error), last_good_state=good.name)
        again = cfg.on_divergence == "rollback"
        if not again or state.rollbacks >= cfg.rollbacks:
            tried = f" after {state.rollbacks} rollbacks" if again else ""
            raise Diverged(
                f"diverged at image {at:,}{tried}: {error}, then go on from the last good state ({good}) with: "
                f"dualmcmc train --resume --out {self.folder.root} KEY=VALUE"
            ) from None
        state.load(good)
        self.config, lowered = guard.gentler(self.config)
        self.iteration.go_on_with(self.config)
        state.rollbacks += 1
        self._read_iteration = state.iteration
        text = ", ".join(f"{key}={value:g}" for key, value in lowered.items())
        self.reporter.say(
            f"diverged at image {at:,} ({error}); rollback {state.rollbacks} of {cfg.rollbacks} to image "
            f"{state.images:,}, with {text}"
        )
        if self.crew.leads:
            for path in damaged:
                self.folder.set_aside(path)
            state.save(good)  # with the gentler settings, which a resumed run must find
            state.save_snapshot(self.folder.snapshot)
            self.folder.write_config(self.config)
            self.journal.rewind(state.images)
        self.journal.event(
            "rollback", state.images, reason=str(error), diverged_at=at, lowered=lowered, number=state.rollbacks
        )
        self._read_at = time.monotonic()
