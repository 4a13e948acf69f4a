"""Training: set up a run, or resume one, and iterate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualmcmc import config_io, rng
from dualmcmc.config import Config, Nets
from dualmcmc.data import DataSplits, describe, fingerprint
from dualmcmc.data import load as load_data
from dualmcmc.data.custom import load_custom
from dualmcmc.data.loader import BatchLoader
from dualmcmc.engine.ddp import init_distributed
from dualmcmc.engine.distributed import World
from dualmcmc.engine.log import NullLog, RunLog, read_log
from dualmcmc.engine.loop import OnLog, OnSave, TrainLoop
from dualmcmc.engine.plan import fit_plan, resolve_plan, without_compilation
from dualmcmc.engine.resume import check_unchanged, nothing_to_resume, resumed_config, with_absolute_paths
from dualmcmc.engine.run_folder import RunFolder, RunLock
from dualmcmc.engine.signals import StopSignals
from dualmcmc.engine.state import TrainState, latest_valid_state, read_config
from dualmcmc.engine.tracking import check_trackers, open_trackers
from dualmcmc.methods import load_method
from dualmcmc.nets import Trio, parameter_counts
from dualmcmc.nets.custom import Networks, as_trio, check_networks, describe_classes, has_gains, require_trainable
from dualmcmc.utils.device import (
    device_name,
    format_bytes,
    peak_memory,
    preserved_settings,
    resolve_device,
    set_deterministic,
    set_num_threads,
)
from dualmcmc.utils.errors import CannotWrite, UserError, sanitize
from dualmcmc.utils.extras import is_installed
from dualmcmc.utils.files import expand_user, make_folder
from dualmcmc.utils.images import as_float
from dualmcmc.utils.progress import ProgressFactory, no_progress
from dualmcmc.utils.reporter import Reporter, make_reporter
from dualmcmc.utils.tree import Tree


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


class _Given(NamedTuple):
    """What the caller has passed in place of what the config describes."""

    networks: Networks | None
    data: Any
    test_data: Any


def train(
    config: Config | str | None,
    out: str | Path,
    device: str | torch.device = "auto",
    resume: bool = False,
    max_images: int | None = None,
    max_minutes: float | None = None,
    *,
    max_training_minutes: float | None = None,
    networks: Networks | None = None,
    data: Any = None,
    test_data: Any = None,
    on_log: OnLog | None = None,
    on_save: OnSave | None = None,
    reporter: Reporter | None = None,
    world: World | None = None,
) -> TrainResult:
    """Train in the folder `out` until train.images, an earlier limit, or a signal.

    `config`: settings, or the name of a preset or YAML file. `resume` continues exactly from the newest valid state;
    `config` may then be None.

    `max_minutes` of this call; `max_training_minutes` over all sessions, without compilation and saving.

    `networks`: your own energy, generator and inference model, trained in place, instead of those of `config.nets`; or
    a function that builds them, called with torch's random numbers seeded by `config.seed`.
    `data`, `test_data`: training and held-out samples (see `data.custom`), instead of those of `config.data`.

    `on_log(stats)` is called with the statistics of each log interval, `on_save(images, snapshot)` after each save. An
    exception that they raise ends training; it can be resumed from the last saved state.

    `reporter` shows progress, by default on standard error; `Reporter()` shows none. If a launcher started several
    processes, each calls this; rank 0 alone writes, prints and calls back. `world`: the processes, if they are
    connected already.
    """
    given = _Given(networks, data, test_data)
    if given.data is None and given.test_data is not None:
        raise UserError("test_data is given without data: pass both, or neither.")
    if config is None and not resume:
        raise UserError("config is None: pass settings or the name of a preset, or resume=True to continue a run.")
    limits = {"max_images": max_images, "max_minutes": max_minutes, "max_training_minutes": max_training_minutes}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise UserError(f"{name} must be greater than 0, not {limit}.")
    folder = RunFolder(expand_user(out))
    connected = world if world is not None else init_distributed(str(device))
    if not connected.is_main:
        reporter = Reporter()
    elif reporter is None:
        reporter = make_reporter()
    try:
        with connected.detect_lost_process(), _preserved_globals(), ExitStack() as cleanup:
            loop = _set_up(config, folder, str(device), resume, given, reporter, connected, cleanup)
            loop.on_log, loop.on_save = on_log, on_save
            if max_training_minutes is not None:
                loop.max_seconds = 60 * max_training_minutes
            reason = loop.run(max_images, max_minutes)
    except CannotWrite as error:
        if not folder.has_states():
            raise
        raise CannotWrite(f"{error} Fix this, then continue from the last saved state with --resume.") from None
    if world is None:
        connected.close()  # not after a failure: the others may be gone
    state = loop.state
    return TrainResult(
        folder.root,
        state.images,
        state.iteration,
        state.seconds,
        reason,
        parameter_counts(state.trio),
        loop.last_stats,
        loop.step.plan.summary,
        connected.size,
        peak_memory(state.device),
    )


@contextmanager
def _preserved_globals() -> Iterator[None]:
    """Gradients on, whatever the caller's mode; afterwards the caller's random sources and settings are back."""
    with rng.preserved(), preserved_settings(), torch.inference_mode(False), torch.enable_grad():
        yield


def _set_up(
    config: Config | str | None,
    folder: RunFolder,
    requested_device: str,
    resume: bool,
    given: _Given,
    reporter: Reporter,
    world: World,
    cleanup: ExitStack,
) -> TrainLoop:
    """Everything before the first iteration; what must be undone afterwards goes to `cleanup`."""
    cfg = config if isinstance(config, Config) else world.on_main(lambda: _load_config(config, folder, resume))
    with world.fail_together():  # before anything is written
        device = world.device(resolve_device(requested_device))
        cfg = with_absolute_paths(cfg, init=not resume)
        if cfg.train.batch % world.size:
            raise UserError(
                f"train.batch={cfg.train.batch} is not divisible by {world.size} processes: use a multiple."
            )
        if world.is_main:
            _check_folder(folder, resume, cleanup)
            check_trackers(cfg.train.trackers, folder)
            cfg, images = _load_data(cfg, given, reporter.progress)
    with world.fail_together():
        networks = None if given.networks is None else as_trio(given.networks, cfg)
        if not world.is_main:  # after rank 0, which may have packed the images
            cfg, images = _load_data(cfg, given)
        set_deterministic(device, cfg.train.deterministic)
        set_num_threads(cfg.engine.threads)
        plan = resolve_plan(cfg.engine, device)
        if load_method(cfg.method).second_order:
            plan = without_compilation(plan, f"method={cfg.method} needs gradients of gradients")
        if networks is not None:
            x = as_float(images.train.take([0, len(images.train) - 1]).to(device))
            check_networks(networks.to(device).train(), x, cfg.teaching.latent_dim)
            require_trainable(networks)
            plan = fit_plan(plan, networks, cfg)
            cfg = replace(cfg, nets=_describe_networks(networks, cfg.nets))
        if not resume:
            cfg = replace(cfg, description=_describe(cfg, given))
        checksum = fingerprint(images.train)
        state = TrainState(cfg, device, checksum, world, networks, len(images.train))
    checksums = world.all_gather(checksum)
    with world.fail_together():
        if len(set(checksums)) > 1:
            raise UserError("the processes see different images: data.path must be the same data on every machine.")
    if networks is not None:
        state.share_weights()
    init = None
    if resume:
        same_noise, damaged = _restore(state, folder)
    else:
        same_noise, damaged = True, []
        if cfg.train.init is None:
            state.normalize_energy(images.train)
        else:
            init = state.load_weights(cfg.train.init)
    with world.fail_together():
        place, flip, workers = cfg.data.place, cfg.data.flip, cfg.data.workers
        loader = BatchLoader(
            images.train, cfg.seed, cfg.train.batch, device, place, flip, workers, world.rank, world.size
        )
    cleanup.callback(loader.close)
    signals = cleanup.enter_context(StopSignals(not world.launched, announce=world.is_main))  # before the first file
    with world.fail_together():
        log: RunLog = NullLog()
        if world.is_main:
            _write_first_files(cfg, state, folder, resume, damaged, cleanup)
            trackers = open_trackers(
                cfg, folder, state.images, resume, reporter.message, lambda: signals.received is not None
            )
            log = RunLog(folder, state.images, trackers)
    cleanup.enter_context(log)
    counts = parameter_counts(state.trio)
    log.event(
        "resume" if resume else "start",
        state.images,
        device=device_name(device),
        torch=torch.__version__,
        parameters=counts,
        data=describe(cfg.data, images),
        resident=loader.resident,
        same_noise=same_noise,
        engine=plan.summary,
        processes=world.size,
        **({"init": init} if init else {}),
    )
    sizes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    placement = "in device memory" if loader.resident else f"streamed ({format_bytes(images.train.nbytes)})"
    where = f"{device_name(device)}, {world.summary}" if world.launched else device_name(device)
    reporter.message(
        f"{len(images.train):,} {cfg.data.noun} on {where}, {placement}; {plan.summary}; parameters: {sizes}"
    )
    if init:
        reporter.message(f"starting from '{sanitize(init['file'], 500)}', trained on {init['images']:,} images")
    if "tensorboard" in cfg.train.trackers and not is_installed("tensorboard"):
        reporter.message(
            "TensorBoard is not installed, so there are no curves but those in log.jsonl; to add it: "
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
    cleanup.callback(reporter.stop)
    return TrainLoop(cfg, state, loader, folder, log, reporter, plan, signals)


def _load_config(config: str | None, folder: RunFolder, resume: bool) -> Config:
    """The settings of a preset or YAML file, or of the run that is resumed."""
    if resume:
        return resumed_config(folder.root, [], config)
    assert config is not None  # checked by `train`
    return config_io.load_config(config)


def _load_data(cfg: Config, given: _Given, progress: ProgressFactory = no_progress) -> tuple[Config, DataSplits]:
    """The training data, and the settings with what is known of data given in Python."""
    if given.data is None:
        return cfg, load_data(cfg.data, progress)
    data, images = load_custom(cfg.data, given.data, given.test_data, progress)
    return replace(cfg, data=data), images


def _describe(cfg: Config, given: _Given) -> str:
    """The description of a preset applies to its own networks and data."""
    others = [name for name in ("networks", "data") if getattr(given, name) is not None]
    return f"{cfg.preset or 'a run'} with custom {' and '.join(others)}" if others else cfg.description


def _describe_networks(networks: Trio, nets: Nets) -> Nets:
    """The settings of networks given in Python: only `energy_slope` may apply to them."""
    slope = nets.energy_slope if has_gains(networks) else None
    return Nets(kind="custom", classes=describe_classes(networks), energy_slope=slope)


def _check_folder(folder: RunFolder, resume: bool, cleanup: ExitStack) -> None:
    """Require a run when resuming, and none otherwise; lock an existing run."""
    folder.require_no_links()
    if folder.has_states():
        if not resume:
            raise UserError(
                f"'{folder.root}' already contains a run: continue it with --resume (in Python resume=True), or choose "
                "another --out."
            )
        make_folder(folder.root)  # raises if it is not writable
        cleanup.enter_context(RunLock(folder.lock))
    elif resume:
        raise nothing_to_resume(folder)
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


def _write_first_files(
    config: Config, state: TrainState, folder: RunFolder, resume: bool, damaged: list[Path], cleanup: ExitStack
) -> None:
    """Write the first files of this session."""
    for part in (folder.root, folder.samples, folder.states):
        make_folder(part)
    if not resume:
        cleanup.enter_context(RunLock(folder.lock))
        _check_folder(folder, resume, cleanup)  # again: another process may have started a run meanwhile
    folder.remove_temporary_files()
    for path in damaged:
        folder.quarantine(path)
    folder.write_config(config)
    if resume:
        state.save_snapshot(folder.snapshot)  # it may have been deleted


def _restore(state: TrainState, folder: RunFolder) -> tuple[bool, list[Path]]:
    """Load the newest valid state: whether its noise stream continues, and the damaged states."""

    def find() -> tuple[Path, list[Path]]:
        path, damaged = latest_valid_state(folder)
        check_unchanged(read_config(path), state.config)
        return path, damaged

    path, damaged = state.world.on_main(find)
    return state.load(path), damaged
