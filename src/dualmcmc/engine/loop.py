"""The training loop: iterate, log, guard against divergence, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from dualmcmc.config import Config
from dualmcmc.data.loader import BatchLoader
from dualmcmc.engine import guard
from dualmcmc.engine.log import RunLog, write_preview
from dualmcmc.engine.plan import ExecutionPlan
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.signals import Interrupted, StopSignals
from dualmcmc.engine.state import TrainState, latest_valid_state
from dualmcmc.engine.step import Abandoned, TrainStep
from dualmcmc.nets.frozen import modes_kept
from dualmcmc.utils.errors import Diverged
from dualmcmc.utils.files import make_folder
from dualmcmc.utils.reporter import Reporter

STOP_REASONS = ["", "max-minutes", "SIGINT", "SIGHUP", "SIGTERM"]  # to stop early, by increasing urgency
OnLog = Callable[[dict[str, float]], None]  # with the statistics of a log interval
OnSave = Callable[[int, Path], None]  # with the number of images and the snapshot
PATIENCE = 2.0  # seconds for an iteration to end after a request to stop; then it is abandoned


class TrainLoop:
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
        signals: StopSignals,
    ) -> None:
        self.config, self.state, self.world = config, state, state.world
        self.folder, self.log, self.reporter, self.signals = folder, log, reporter, signals
        self.on_log: OnLog | None = None
        self.on_save: OnSave | None = None
        self.deadline = math.inf  # on the monotonic clock
        self.max_seconds = math.inf  # of training, over all sessions; as logged, without compilation and saving
        self.step = TrainStep(config, state, loader, plan, state.world, self._out_of_patience)
        self.last_stats: dict[str, float] = {}
        self._read_at, self._read_iteration = time.monotonic(), state.iteration
        self._dry_run_seconds = self._save_seconds = 0.0  # of the last ones

    def run(self, max_images: int | None, max_minutes: float | None) -> str:
        """Iterate until there is a reason to stop; returns it."""
        cfg, state = self.config.train, self.state
        target = cfg.images if max_images is None else min(cfg.images, max_images)
        if max_minutes is not None:
            self.deadline = time.monotonic() + 60 * max_minutes
        if state.images == 0:
            self._save()  # a run that diverges early then still has a valid state
        self._read_at, urgency = time.monotonic(), 0
        try:
            with self.signals.interruptible():
                if state.images < target:
                    self.step.prepare(self.reporter.progress, self._notify)
        except Interrupted:
            urgency = self._stop_urgency()
        if reason := STOP_REASONS[max(self.world.all_gather(urgency))]:
            return self._stop(reason)
        self.reporter.start(state.images, target)
        self._read_at = time.monotonic()
        while state.images < target:
            try:
                self.step()
            except Abandoned:
                return self._stop_within_iteration()
            self.reporter.advance(state.images, state.iteration)
            reason = STOP_REASONS[self.world.any_rank(self._stop_urgency())]
            if state.images >= target:
                reason = "finished" if target == cfg.images else "max-images"
            try:
                self._after_iteration(reason)
            except Diverged as error:
                self._roll_back(error)
                continue
            if reason:
                return self._stop(reason)
        return "finished" if target == cfg.images else "max-images"

    def _notify(self, text: str) -> None:
        self.reporter.message(text)
        self.log.event("note", self.state.images, text=text)

    def _stop_urgency(self) -> int:
        """The index in STOP_REASONS of what this process wants."""
        if self.signals.received is not None:
            return STOP_REASONS.index(self.signals.received.name)
        now = time.monotonic()
        return int(now >= self.deadline or self.state.seconds + now - self._read_at >= self.max_seconds)

    def _out_of_patience(self) -> bool:
        """Whether this process has wanted to stop for longer than an iteration may take."""
        waited = max(self.signals.seconds_since_signal, time.monotonic() - self.deadline)
        return self._stop_urgency() > 0 and waited >= PATIENCE

    def _stop_within_iteration(self) -> str:
        """Save the state from before the iteration that was abandoned, and stop."""
        reason = STOP_REASONS[self._stop_urgency()]
        self._notify(f"{reason}: abandoned an iteration between two chain steps; --resume repeats it")
        try:
            if self.state.iteration > self._read_iteration:
                self._read_stats()
            self._save(dry_run=False)  # which would take about as long as the iteration
        except Diverged as error:
            self._roll_back(error)
        return self._stop(reason)

    def _stop(self, reason: str) -> str:
        self.log.event("stop", self.state.images, reason=reason)
        return reason

    def _after_iteration(self, reason: str) -> None:
        """Read statistics, save, and draw samples if they are due, or if the session ends for `reason`."""
        cfg, state = self.config.train, self.state
        urgent = reason == "SIGTERM"
        keep_snapshot = cfg.snapshot_every is not None and (reason == "finished" or self._is_due(cfg.snapshot_every))
        save = bool(reason) or keep_snapshot or self._is_due(cfg.save_every)
        preview = self.config.data.is_image and ((bool(reason) and not urgent) or self._is_due(cfg.sample_every))
        if save or preview or state.iteration % cfg.log_every == 0:
            self._read_stats()
        if save:
            needed = self.signals.seconds_since_signal + self._dry_run_seconds + 2 * self._save_seconds
            dry_run = not urgent or self.world.on_main(lambda: needed < cfg.grace)
            self._save(dry_run, keep_snapshot)
        if preview and not urgent and not self._out_of_patience() and self.world.is_main:
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
            **{f"lr_{name}": rate for name, rate in state.learning_rates.items()},
        } | stats
        self.log.stats(self.last_stats)
        guard.check(self.last_stats, self.config.guard)
        self.reporter.stats(self.last_stats)
        if self.on_log is not None and self.world.is_main:
            with modes_kept(self.state.trio):
                self.on_log(dict(self.last_stats))

    def _save(self, dry_run: bool = True, keep_snapshot: bool = False) -> None:
        """Save the full state and the snapshot, if they are healthy."""
        start = time.monotonic()
        if self.state.images > 0 and dry_run:
            try:  # the logged statistics are from before the last update
                guard.check(self.step.dry_run(), self.config.guard)
                self._dry_run_seconds = time.monotonic() - start
            except Abandoned:
                dry_run = False
        save_start = time.monotonic()
        if not dry_run and any(self.world.all_gather(not self.state.is_finite())):
            raise Diverged(f"a weight is not finite. {guard.advice(self.last_stats)}")
        self.state.synchronize()
        if self.world.is_main:
            if keep_snapshot:  # before the state: a run killed in between would resume after it
                make_folder(self.folder.snapshots)
                self.state.save_snapshot(self.folder.snapshot_path(self.state.images))
            path = self.folder.state_path(self.state.images)
            self.state.save(path)
            self.state.save_snapshot(self.folder.snapshot)
            if dry_run:  # otherwise the state is only known to be finite: keep those before it
                self.folder.prune_states(self.config.train.keep)
            seconds = time.monotonic() - start
            self.log.event("save", self.state.images, state=path.name, seconds=round(seconds, 3))
        self._save_seconds = time.monotonic() - save_start
        if self.on_save is not None and self.world.is_main:
            with modes_kept(self.state.trio):
                self.on_save(self.state.images, self.folder.snapshot)

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
