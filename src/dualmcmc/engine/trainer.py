"""Training: set up a run, iterate, log, guard against divergence, save."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualmcmc import config_io, data
from dualmcmc.config import Config
from dualmcmc.data.loader import BatchLoader
from dualmcmc.engine import guard
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.log import NullLog, RunLog, write_preview
from dualmcmc.engine.plan import ExecutionPlan, resolve_plan
from dualmcmc.engine.run_folder import RunFolder, RunLock
from dualmcmc.engine.signals import Interrupted, StopSignals
from dualmcmc.engine.state import TrainState, check_size, latest_valid_state, read_config
from dualmcmc.engine.step import TrainStep
from dualmcmc.nets import parameter_counts
from dualmcmc.pretrained import pretrained_file
from dualmcmc.utils.device import (
    device_name,
    format_bytes,
    peak_memory,
    resolve_device,
    set_deterministic,
    set_num_threads,
)
from dualmcmc.utils.errors import CannotWrite, Diverged, UserError, sanitize
from dualmcmc.utils.files import expand_user, make_folder
from dualmcmc.utils.progress import Reporter

FIXED = ("seed", "data", "nets", "teaching.latent_dim", "ema", "train.init")  # a resumed run cannot change these,
FREE = ("data.path", "data.test_path", "data.place", "data.workers")  # except for where its images are
STOP_REASONS = ["", "max-minutes", "SIGINT", "SIGHUP", "SIGTERM"]  # to stop early, by increasing urgency


@dataclass(frozen=True)
class TrainResult:
    """How a call of `train` ended."""

    folder: Path
    images: int
    iterations: int
    seconds: float  # of training, over all sessions
    stop_reason: str  # finished, max-images, max-minutes, SIGINT, SIGHUP or SIGTERM
    parameters: dict[str, int]
    stats: dict[str, float]  # the last ones logged
    engine: str
    processes: int
    peak_memory: int  # bytes; of the GPU if there is one


def train(
    config: Config,
    out: str | Path,
    device: str | torch.device = "auto",
    resume: bool = False,
    max_images: int | None = None,
    max_minutes: float | None = None,
    reporter: Reporter | None = None,
    world: World = SINGLE_PROCESS,
) -> TrainResult:
    """Train `config` in the folder `out` until train.images, an earlier limit, or a signal.

    `resume` continues exactly from the newest valid state. With several processes (`engine.distributed`) every rank
    calls this; rank 0 alone writes and prints.
    """
    reporter = reporter if reporter is not None and world.is_main else Reporter()
    folder = RunFolder(Path(out))
    try:
        with world.detect_lost_process(), ExitStack() as cleanup:
            return _train(config, folder, str(device), resume, max_images, max_minutes, reporter, world, cleanup)
    except CannotWrite as error:
        if not folder.has_states():
            raise
        raise CannotWrite(f"{error} Fix this, then continue from the last saved state with --resume.") from None


def _train(
    config: Config,
    folder: RunFolder,
    requested_device: str,
    resume: bool,
    max_images: int | None,
    max_minutes: float | None,
    reporter: Reporter,
    world: World,
    cleanup: ExitStack,
) -> TrainResult:
    with world.fail_together():  # before anything is written
        device = world.device(resolve_device(requested_device))
        config = with_absolute_paths(config, init=not resume)
        if config.train.batch % world.size:
            raise UserError(
                f"train.batch={config.train.batch} is not divisible by {world.size} processes: use a multiple."
            )
        if world.is_main:
            _check_folder(folder, resume, cleanup)
            images = data.load(config.data, reporter.progress)
    with world.fail_together():
        if not world.is_main:  # after rank 0, which may have packed the images
            images = data.load(config.data)
        set_deterministic(device, config.train.deterministic)
        set_num_threads(config.engine.threads)
        plan = resolve_plan(config.engine, device)
        fingerprint = data.fingerprint(images.train)
        state = TrainState(config, device, fingerprint, world)
    fingerprints = world.all_gather(fingerprint)
    with world.fail_together():
        if len(set(fingerprints)) > 1:
            raise UserError("the processes see different images: data.path must be the same data on every machine.")
    init = None
    if resume:
        same_noise, damaged = _restore(state, folder)
    else:
        same_noise, damaged = True, []
        if config.train.init is None:
            state.normalize_energy(images.train)
        else:
            init = state.load_weights(config.train.init)
    with world.fail_together():
        cfg, batch = config.data, config.train.batch
        loader = BatchLoader(
            images.train, config.seed, batch, device, cfg.place, cfg.flip, cfg.workers, world.rank, world.size
        )
    cleanup.callback(loader.close)
    signals = cleanup.enter_context(StopSignals(not world.launched, announce=world.is_main))  # before the first file
    with world.fail_together():
        log = _open_log(config, state, folder, resume, damaged, cleanup) if world.is_main else NullLog()
    cleanup.callback(log.close)
    counts = parameter_counts(state.trio)
    log.event(
        "resume" if resume else "start",
        state.images,
        device=device_name(device),
        torch=torch.__version__,
        parameters=counts,
        data=data.describe(cfg, images),
        resident=loader.resident,
        same_noise=same_noise,
        engine=plan.summary,
        processes=world.size,
        **({"init": init} if init else {}),
    )
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    placement = "in device memory" if loader.resident else f"streamed ({format_bytes(images.train.nbytes)})"
    where = f"{device_name(device)}, {world.summary}" if world.launched else device_name(device)
    reporter.message(f"{len(images.train):,} images on {where}, {placement}; {plan.summary}; parameters: {sizes}")
    if init:
        reporter.message(f"starting from '{sanitize(init['file'], 500)}', trained on {init['images']:,} images")
    for note in (*images.notes, *plan.notes):
        reporter.message(note)
    for path in damaged:
        text = f"'{path}' is damaged: resuming from the state before it, at image {state.images:,}"
        reporter.message(text)
        log.event("note", state.images, text=text)
    if not same_noise:
        reporter.message("the run moved to another type of device: its noise stream restarts, all else continues")
    loop = _TrainLoop(config, state, loader, folder, log, reporter, plan)
    cleanup.callback(reporter.stop)
    reason = loop.run(signals, max_images, max_minutes)
    return TrainResult(
        folder.root,
        state.images,
        state.iteration,
        state.seconds,
        reason,
        counts,
        loop.last_stats,
        loop.step.plan.summary,
        world.size,
        peak_memory(device),
    )


def _check_folder(folder: RunFolder, resume: bool, cleanup: ExitStack) -> None:
    """Require a run when resuming, and none otherwise; lock an existing run."""
    folder.require_no_links()
    if folder.has_states():
        if not resume:
            raise UserError(
                f"'{folder.root}' already contains a run: add --resume to continue it, or choose another --out."
            )
        make_folder(folder.root)  # raises if it is not writable
        cleanup.enter_context(RunLock(folder.lock))
    elif resume:
        raise _nothing_to_resume(folder)
    elif traces := folder.traces_of_a_run():
        advice = f" To start from its weights, add --init {folder.root}." if folder.snapshot.exists() else ""
        raise UserError(
            f"'{folder.root}' contains {traces[0].name}, which a new run would write over: choose another --out."
            f"{advice}"
        )


def _nothing_to_resume(folder: RunFolder) -> UserError:
    if folder.snapshot.exists():
        return UserError(
            f"'{folder.root}' has no saved state to resume from, but a snapshot: to start a new run from its weights, "
            f"use --init {folder.root} and another --out."
        )
    return UserError(f"there is no run to resume in '{folder.root}': omit --resume to start one.")


def _open_log(
    config: Config, state: TrainState, folder: RunFolder, resume: bool, damaged: list[Path], cleanup: ExitStack
) -> RunLog:
    """Write the first files of this session."""
    for part in (folder.root, folder.samples, folder.states):
        make_folder(part)
    if resume:
        folder.remove_temporary_files()
    else:
        cleanup.enter_context(RunLock(folder.lock))
        _check_folder(folder, resume, cleanup)  # again: another process may have started a run meanwhile
    for path in damaged:
        folder.quarantine(path)
    folder.write_config(config)
    if resume:
        state.save_snapshot(folder.snapshot)  # it may have been deleted
    return RunLog(folder, state.images)


def _restore(state: TrainState, folder: RunFolder) -> tuple[bool, list[Path]]:
    """Load the newest valid state: whether its noise stream continues, and the damaged states."""
    path, damaged = state.world.on_main(lambda: latest_valid_state(folder))
    return state.load(path), damaged


def with_absolute_paths(config: Config, init: bool = True) -> Config:
    """The config as it is stored: a run can be resumed from any working directory. `init` false: keep `train.init`."""
    cfg, train = config.data, config.train
    if init and train.init is not None and pretrained_file(Path(train.init)) is None:
        train = replace(train, init=_absolute(train.init))
    return replace(config, data=replace(cfg, path=_absolute(cfg.path), test_path=_absolute(cfg.test_path)), train=train)


def _absolute(path: str | None) -> str | None:
    return path and str(expand_user(path).absolute())


def resumed_config(out: Path, overrides: list[str], preset: str | None = None) -> Config:
    """A run's own settings with overrides; refuses those that would make it a different run.

    `preset`, if the caller named one, must be the run's.
    """
    folder = RunFolder(out)
    folder.require_no_links()  # before the lock file is written
    if not folder.has_states():
        raise _nothing_to_resume(folder)
    with RunLock(folder.lock):  # a run in training replaces its states
        state = latest_valid_state(folder)[0]
        old = read_config(state)  # what it was trained with, even if config.yaml was edited
        check_size(old, state.stat().st_size, state)
    if preset is not None and config_io.load_config(preset).preset != old.preset:
        raise UserError(f"the run in '{out}' uses preset '{old.preset}', not '{preset}': name that one, or none.")
    new = config_io.from_tree(config_io.apply_overrides(config_io.to_tree(old), overrides), "the resumed run")
    if _absolute(new.train.init) == old.train.init:  # the same command again, with a relative path
        new = replace(new, train=replace(new.train, init=old.train.init))
    before, after = config_io.flatten(old), config_io.flatten(new)
    for key in before:
        fixed = any(key == name or key.startswith(name + ".") for name in FIXED)
        if fixed and before[key] != after[key] and key not in FREE:
            raise UserError(
                f"a resumed run cannot change {key} from {before[key]} to {after[key]}: start a new run instead."
            )
    return new


class _TrainLoop:
    """The iterations of one session, and what happens between them."""

    def __init__(
        self,
        config: Config,
        state: TrainState,
        loader: BatchLoader,
        folder: RunFolder,
        log: RunLog,
        reporter: Reporter,
        plan: ExecutionPlan,
    ) -> None:
        self.config, self.state, self.world = config, state, state.world
        self.folder, self.log, self.reporter = folder, log, reporter
        self.step = TrainStep(config, state, loader, plan, state.world)
        self.last_stats: dict[str, float] = {}
        self._read_at, self._read_iteration = time.monotonic(), state.iteration
        self._dry_run_seconds = self._save_seconds = 0.0  # of the last ones

    def run(self, signals: StopSignals, max_images: int | None, max_minutes: float | None) -> str:
        """Iterate until there is a reason to stop; returns it."""
        cfg, state = self.config.train, self.state
        target = cfg.images if max_images is None else min(cfg.images, max_images)
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        if state.images == 0:
            self._save()  # a run that diverges early then still has a valid state
        urgency = 0
        try:
            with signals.interruptible():
                if state.images < target:
                    self.step.prepare(self.reporter.progress, self._notify)
        except Interrupted:
            urgency = self._stop_urgency(signals, None)
        if reason := STOP_REASONS[max(self.world.all_gather(urgency))]:
            return self._stop(reason)
        self.reporter.start(state.images, target)
        self._read_at = time.monotonic()
        while state.images < target:
            self.step()
            self.reporter.advance(state.images, state.iteration)
            reason = STOP_REASONS[self.world.any_rank(self._stop_urgency(signals, deadline))]
            if state.images >= target:
                reason = "finished" if target == cfg.images else "max-images"
            try:
                self._after_iteration(reason, signals)
            except Diverged as error:
                self._roll_back(error)
                continue
            if reason:
                return self._stop(reason)
        return "finished" if target == cfg.images else "max-images"

    def _notify(self, text: str) -> None:
        self.reporter.message(text)
        self.log.event("note", self.state.images, text=text)

    def _stop_urgency(self, signals: StopSignals, deadline: float | None) -> int:
        """The index in STOP_REASONS of what this process wants."""
        if signals.received is not None:
            return STOP_REASONS.index(signals.received.name)
        return int(deadline is not None and time.monotonic() >= deadline)

    def _stop(self, reason: str) -> str:
        self.log.event("stop", self.state.images, reason=reason)
        return reason

    def _after_iteration(self, reason: str, signals: StopSignals) -> None:
        """Read statistics, save, and draw samples if they are due, or if the session ends for `reason`."""
        cfg, state = self.config.train, self.state
        urgent = reason == "SIGTERM"
        keep_snapshot = cfg.snapshot_every is not None and (reason == "finished" or self._is_due(cfg.snapshot_every))
        save = bool(reason) or keep_snapshot or self._is_due(cfg.save_every)
        preview = (bool(reason) and not urgent) or self._is_due(cfg.sample_every)
        if save or preview or state.iteration % cfg.log_every == 0:
            self._read_stats()
        if save:
            needed = signals.seconds_since_signal + self._dry_run_seconds + 2 * self._save_seconds
            dry_run = not urgent or self.world.on_main(lambda: needed < cfg.grace)
            self._save(dry_run, keep_snapshot)
        if preview and not urgent and self.world.is_main:
            self.log.image("samples", write_preview(state, self.folder), state.images)
        if save or preview:
            self._read_at = time.monotonic()  # neither counts as training time

    def _is_due(self, every: int) -> bool:
        """Whether the last batch crossed a multiple of `every` images."""
        return self.state.images // every > (self.state.images - self.config.train.batch) // every

    def _read_stats(self) -> None:
        """Synchronise with the device, log the statistics, raise `Diverged` if they exceed the guard's limits."""
        state = self.state
        iterations = state.iteration - self._read_iteration
        stats = self.step.window.read(iterations, self.world)
        now = time.monotonic()
        elapsed = now - self._read_at
        state.seconds += elapsed
        self._read_at, self._read_iteration = now, state.iteration
        self.last_stats = {
            "iteration": state.iteration,
            "images": state.images,
            "seconds": round(state.seconds, 3),
            "iterations_per_second": iterations / elapsed,
            "lr_energy": state.learning_rates["energy"],
        } | stats
        self.log.stats(self.last_stats)
        guard.check(self.last_stats, self.config.guard)
        self.reporter.stats(self.last_stats)

    def _save(self, dry_run: bool = True, keep_snapshot: bool = False) -> None:
        """Save the full state and the snapshot, if they are healthy."""
        start = time.monotonic()
        if self.state.images > 0 and dry_run:
            # the logged statistics are from before the last update
            guard.check(self.step.dry_run(), self.config.guard)
            self._dry_run_seconds = time.monotonic() - start
        save_start = time.monotonic()
        if not dry_run and any(self.world.all_gather(not self.state.is_finite())):
            raise Diverged(f"a weight is not finite. {guard.ADVICE}")
        self.state.synchronize()
        if self.world.is_main:
            if keep_snapshot:  # before the state: a run killed in between would resume after it
                make_folder(self.folder.snapshots)
                self.state.save_snapshot(self.folder.snapshot_path(self.state.images))
            path = self.folder.state_path(self.state.images)
            self.state.save(path)
            self.state.save_snapshot(self.folder.snapshot)
            self.folder.prune_states(self.config.train.keep)
            seconds = time.monotonic() - start
            self.log.event("save", self.state.images, state=path.name, seconds=round(seconds, 3))
        self._save_seconds = time.monotonic() - save_start

    def _roll_back(self, error: Diverged) -> None:
        """Continue from the last valid state with reduced rates, if `guard` allows it; otherwise raise."""
        state, cfg, at = self.state, self.config.guard, self.state.images
        valid, damaged = self.world.on_main(lambda: latest_valid_state(self.folder))
        self.log.event("diverged", at, reason=str(error), last_valid_state=valid.name)
        allowed = cfg.on_divergence == "rollback"
        if not allowed or state.rollbacks >= cfg.max_rollbacks:
            count = f" after {state.rollbacks} rollbacks" if allowed else ""
            raise Diverged(
                f"diverged at image {at:,}{count}: {error}, and continue from the last valid state ({valid}) with: "
                f"dualmcmc train --resume --out {self.folder.root} KEY=VALUE"
            ) from None
        state.load(valid)
        self.config, reduced = guard.back_off(self.config)
        self.step.reconfigure(self.config)
        state.rollbacks += 1
        self._read_iteration = state.iteration
        changes = ", ".join(f"{key}={value:g}" for key, value in reduced.items())
        self.reporter.message(
            f"diverged at image {at:,} ({error}); rollback {state.rollbacks} of {cfg.max_rollbacks} to image "
            f"{state.images:,}, with {changes}"
        )
        if self.world.is_main:
            for path in damaged:
                self.folder.quarantine(path)
            state.save(valid)  # with the reduced rates, for a later --resume
            state.save_snapshot(self.folder.snapshot)
            self.folder.write_config(self.config)
            self.log.rewind(state.images)
        self.log.event(
            "rollback", state.images, reason=str(error), diverged_at=at, reduced=reduced, number=state.rollbacks
        )
        self._read_at = time.monotonic()
