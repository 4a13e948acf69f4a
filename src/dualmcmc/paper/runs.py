"""The runs behind the paper's tables, at three scales: trained, continued or reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.engine import checkpoint, trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import check_unchanged, with_absolute_paths
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import read_config
from dualmcmc.health.history import curve, effective_lines
from dualmcmc.paper.experiments import VARIANTS, WIDTHS, Experiment
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.reporter import Reporter

MINUTES_TO_MEASURE = 0.75  # of a run's share of the budget
WORTH_STARTING = 0.05  # minutes of training left


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
        ("optim.cooldown=0",),
        minutes=25,
    ),
    "full": Scale(
        "CIFAR-10 with the paper's networks and schedule: days of a GPU", "cifar10-resnet", "cifar10-simple-authors"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PaperRun:
    """One run: its settings, its folder, and the minutes it may train; None: to the end."""

    variant: str
    config: Config
    folder: Path
    minutes: float | None

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
    """The runs of an experiment. Variants with equal settings are one run."""
    scale = SCALES[scale_name]
    preset = scale.simple_preset if experiment.simple else scale.preset
    minutes = None
    if scale.minutes is not None:
        minutes = scale.minutes / len(experiment.variants) - MINUTES_TO_MEASURE
    folders: dict[Config, Path] = {}
    runs: list[PaperRun] = []
    for variant in ("dual-mcmc", *experiment.variants):
        config = with_absolute_paths(_config(preset, variant, [*scale.settings, *settings]))
        folder = folders.setdefault(config, out / "runs" / f"{scale_name}-{preset}-{variant}")
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


def train(run: PaperRun, device: str, reporter: Reporter, notify: Callable[[str], None]) -> None:
    """Train a run, or what is left of it; raises `UserError` if it was stopped."""
    folder, left = RunFolder(run.folder), None
    resume = folder.has_states()
    if resume:
        state = folder.latest_state()
        check_unchanged(read_config(state), run.config)
        finished = checkpoint.load_info(state)["images"] >= run.config.train.images
        if finished or (run.minutes is not None and run.minutes - run.trained_minutes < WORTH_STARTING):
            return
    if run.minutes is not None:
        left = run.minutes - run.trained_minutes
    notify(f"training {run.folder.name}" + ("" if left is None else f", {left:.1f} minutes"))
    result = trainer.train(run.config, run.folder, device, resume, max_minutes=left, reporter=reporter)
    if result.stop_reason not in ("finished", "max-minutes"):
        raise UserError(f"{run.folder.name} was stopped ({result.stop_reason}): the same command continues it.")
