"""Training: set up a run, or resume one, and iterate."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dualmcmc import config_io, data
from dualmcmc.config import Config
from dualmcmc.data.loader import BatchLoader
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.log import NullLog, RunLog, has_tensorboard, read_log
from dualmcmc.engine.loop import TrainLoop
from dualmcmc.engine.plan import resolve_plan
from dualmcmc.engine.run_folder import RunFolder, RunLock
from dualmcmc.engine.signals import StopSignals
from dualmcmc.engine.state import TrainState, check_size, latest_valid_state, read_config
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
from dualmcmc.utils.errors import CannotWrite, UserError, sanitize
from dualmcmc.utils.files import expand_user, make_folder
from dualmcmc.utils.progress import Reporter
from dualmcmc.utils.tree import Tree

FIXED = ("seed", "data", "nets", "teaching.latent_dim", "ema", "train.init")  # a resumed run cannot change these,
FREE = ("data.path", "data.test_path", "data.place", "data.workers")  # except for where its images are


@dataclass(frozen=True)
class TrainResult(Tree):
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
    if not has_tensorboard():
        reporter.message(
            "TensorBoard is not installed, so statistics go to log.jsonl only; to add it: "
            "pip install 'dualmcmc[trackers]'"
        )
    for note in (*images.notes, *plan.notes):
        reporter.message(note)
    for path in damaged:
        text = f"'{path}' is damaged: resuming from the state before it, at image {state.images:,}"
        reporter.message(text)
        log.event("note", state.images, text=text)
    if not same_noise:
        reporter.message("the run moved to another type of device: its noise stream restarts, all else continues")
    loop = TrainLoop(config, state, loader, folder, log, reporter, plan, signals)
    cleanup.callback(reporter.stop)
    reason = loop.run(max_images, max_minutes)
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
    elif (traces := folder.traces_of_a_run()) and not _ended_before_first_state(folder):
        advice = f" To start from its weights, add --init {folder.root}." if folder.snapshot.exists() else ""
        raise UserError(
            f"'{folder.root}' contains {traces[0].name}, which a new run would write over: choose another --out."
            f"{advice}"
        )


def _ended_before_first_state(folder: RunFolder) -> bool:
    """Whether a run was killed here before it had anything to lose: it left no more than its settings and its start."""
    if folder.snapshot.exists() or folder.results.exists() or not folder.states.is_dir():
        return False
    return {entry["kind"] for entry in read_log(folder.log)} <= {"start", "note"}


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
    if not resume:
        cleanup.enter_context(RunLock(folder.lock))
        _check_folder(folder, resume, cleanup)  # again: another process may have started a run meanwhile
    if resume or folder.config.exists():
        folder.remove_temporary_files()
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
