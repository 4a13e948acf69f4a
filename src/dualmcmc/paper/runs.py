"""The runs behind the paper's tables, at three scales: trained, continued or reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dualmcmc import config_io
from dualmcmc.config import Config, Sampling
from dualmcmc.engine import checkpoint, guard, trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import with_absolute_paths
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import latest_valid_state, read_config
from dualmcmc.health.history import curve, effective_lines
from dualmcmc.paper.experiments import VARIANTS, WIDTHS, Experiment
from dualmcmc.utils.errors import Diverged, UserError, first_line
from dualmcmc.utils.reporter import Reporter

MINUTES_TO_MEASURE = 1.25  # and to compile, of a run's share of the budget

MAY_DIFFER = (  # between a run and what it should be, without a new one
    "sampling.", "engine.", "data.path", "data.test_path", "data.place", "data.workers", "train.log_every",
    "train.sample_every", "train.save_every", "train.snapshot_every", "train.keep", "train.grace", "train.trackers",
    "description",
)  # fmt: skip


class Stopped(UserError):
    """A run was stopped by a signal, and can be continued."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Scale:
    """How large the runs are. `minutes` for an experiment, training and measuring, shared evenly by its runs."""

    description: str
    preset: str
    simple_preset: str  # with the paper's small networks
    settings: tuple[str, ...] = ()
    minutes: float | None = None  # None: the preset's train.images
    samples: int = 50_000
    images: int | None = None  # to reconstruct; None: all


SCALES = {
    "smoke": Scale(
        "tiny networks on digits, to see that it works: about a minute on a CPU",
        "digits",
        "digits",
        (
            "nets.energy_width=4", "nets.generator_width=4", "nets.inference_width=4", "teaching.latent_dim=4",
            "train.batch=32", "train.images=960", "train.save_every=960", "train.sample_every=960", "train.log_every=5",
        ),
        samples=100,
        images=50,
    ),
    "short": Scale(
        "CIFAR-10 with small networks, 25 minutes of a GPU per experiment, the same for each of its runs",
        "cifar10-simple",
        "cifar10-simple",
        ("optim.cooldown=0", "train.save_every=200000"),  # a slow method sees fewer images than the default interval
        minutes=25,
    ),
    "full": Scale(
        "CIFAR-10 with the paper's networks and schedule: days of a GPU", "cifar10-resnet", "cifar10-simple-authors"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PaperRun:
    """One run: its settings, its folder, and the minutes of training alone; None: to the end."""

    variant: str
    config: Config
    folder: Path
    minutes: float | None

    @property
    def finished(self) -> bool:
        """Whether it has been trained to the end of its settings."""
        folder = RunFolder(self.folder)
        return folder.has_states() and _images(folder.latest_state()) >= self.config.train.images

    @property
    def trained_minutes(self) -> float:
        """So far."""
        times = curve(effective_lines(read_log(RunFolder(self.folder).log)), "seconds")
        return times[-1][1] / 60 if times else 0.0

    @property
    def seconds_per_iteration(self) -> float | None:
        """Over the second half of the log, without warm-up; None without a log."""
        rates = [
            rate for _, rate in curve(effective_lines(read_log(RunFolder(self.folder).log)), "iterations_per_second")
        ]
        recent = sorted(rates[len(rates) // 2 :])
        return 1 / recent[len(recent) // 2] if recent else None


def plan_runs(experiment: Experiment, scale_name: str, out: Path, settings: list[str]) -> list[PaperRun]:
    """The runs of an experiment. Variants that are trained with equal settings share a folder.

    Runs with a budget are shared only with experiments that give them the same.
    """
    scale = SCALES[scale_name]
    for text in settings:
        if text.partition("=")[0].strip() in ("method", "teaching.z_start"):
            raise UserError(f"{text}: the experiments choose the method of each run.")
    preset = scale.simple_preset if experiment.simple else scale.preset
    minutes, prefix = None, f"{scale_name}-{preset}"
    if scale.minutes is not None:
        minutes = scale.minutes / len(experiment.variants) - MINUTES_TO_MEASURE
        prefix += f"-{minutes:.2f}min"
    folders: dict[Config, Path] = {}
    runs: list[PaperRun] = []
    for variant in ("dual-mcmc", *experiment.variants):
        config = with_absolute_paths(_config(preset, variant, [*scale.settings, *settings]))
        trained = replace(config, sampling=Sampling())
        folder = folders.setdefault(trained, out / "runs" / f"{prefix}-{variant}")
        if variant in experiment.variants and all(run.variant != variant for run in runs):
            runs.append(PaperRun(variant, config, folder, minutes))
    return runs


def _config(preset: str, variant: str, settings: list[str]) -> Config:
    config = config_io.load_config(preset, [*settings, *VARIANTS[variant]])
    if (factor := WIDTHS.get(variant)) is None:
        return config
    widths = [
        f"nets.{net}_width={max(1, round(factor * getattr(config.nets, f'{net}_width')))}"
        for net in ("energy", "generator")
    ]
    return config_io.load_config(preset, [*settings, *VARIANTS[variant], *widths])


def train(run: PaperRun, device: str, reporter: Reporter, notify: Callable[[str], None]) -> str | None:
    """Train a run, or what is left of it; returns why it diverged, if it did. Raises `Stopped` if it was stopped."""
    folder = RunFolder(run.folder)
    resume = folder.has_states()
    if resume:
        state, _ = latest_valid_state(folder)
        info = checkpoint.load_info(state)
        _check_same(read_config(state), run, info["rollbacks"])
        if info["images"] >= run.config.train.images:
            return None
        if run.minutes is not None and info["seconds"] >= 60 * run.minutes:
            return None
        if reason := _divergence(folder):
            return reason
    notify(f"training {run.folder.name}" + ("" if run.minutes is None else f", {run.minutes:.2f} minutes"))
    try:
        result = trainer.train(
            run.config, run.folder, device, resume, max_training_minutes=run.minutes, reporter=reporter
        )
    except Diverged as error:
        notify(f"{run.folder.name}: {first_line(error)}")
        return _divergence(folder)
    if result.stop_reason not in ("finished", "max-minutes"):
        raise Stopped(
            f"{run.folder.name} was stopped ({result.stop_reason}): the same command continues it.", result.stop_reason
        )
    return None


def _check_same(old: Config, run: PaperRun, rollbacks: int) -> None:
    """Raise `UserError` unless a run was trained with the settings it should have; `sampling` may differ."""
    new = run.config
    for _ in range(rollbacks):
        new, _ = guard.back_off(new)
    before, after = config_io.flatten(old), config_io.flatten(new)
    for key in before:
        if before[key] != after[key] and not key.startswith(MAY_DIFFER):
            raise UserError(
                f"'{run.folder}' was trained with {key}={before[key]}, not {after[key]}: choose another --out."
            )


def _divergence(folder: RunFolder) -> str | None:
    """Why a run diverged, if that is how it ended."""
    events = [entry for entry in read_log(folder.log) if entry["kind"] not in ("train", "note")]
    if not events or events[-1]["kind"] != "diverged":
        return None
    return f"diverged at image {events[-1]['images']:,}, measured at image {_images(folder.snapshot):,}"


def _images(file: Path) -> int:
    return int(checkpoint.load_info(file)["images"])
