"""Run an experiment of the paper: train what is missing, measure what is new, write the table."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dualmcmc import config_io
from dualmcmc.engine import trainer
from dualmcmc.engine.run_folder import locate_snapshot
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.paper.experiments import EXPERIMENTS
from dualmcmc.paper.measure import MEASURES, Measurement
from dualmcmc.paper.runs import SCALES, PaperRun, plan_runs, train
from dualmcmc.paper.tables import Table, make_table
from dualmcmc.tasks.load import load
from dualmcmc.utils.device import device_name, resolve_device
from dualmcmc.utils.errors import NotFinite, UserError, first_line
from dualmcmc.utils.files import digest, make_folder, to_json, write_text
from dualmcmc.utils.progress import ProgressFactory, no_progress
from dualmcmc.utils.reporter import Reporter

DATASET = "cifar10"  # of the paper's tables
PREDICTION_ITERATIONS = 8  # on a GPU, the graph of an iteration is captured after the third


def run_experiment(
    name: str,
    scale_name: str,
    out: Path,
    device: str = "auto",
    settings: list[str] | None = None,
    features: FeatureExtractor | None = None,
    reporter: Reporter | None = None,
    notify: Callable[[str], None] = lambda text: None,
    progress: ProgressFactory = no_progress,
) -> Table:
    """Measure an experiment, and write OUT/NAME-SCALE.md, .csv, .html and .json.

    What was trained and measured before is reused, also by other experiments. Without `features`, FID's network, the
    scale smoke measures distances of pixels.
    """
    experiment, scale = EXPERIMENTS[name], SCALES[scale_name]
    target = check_device(scale_name, device)
    if scale_name != "smoke" and features is None and "samples" in experiment.measures:
        raise UserError("FID needs the Inception weights: 'dualmcmc data fetch inception'.")
    runs = plan_runs(experiment, scale_name, out, settings or [])
    make_folder(out / "runs")
    if scale_name == "full":
        announce([run for run in runs if not run.finished], str(target), notify)
    measurement = Measurement(scale, features if scale_name != "smoke" else None, progress)
    numbers: dict[str, dict[str, float | None]] = {}
    facts: dict[str, str] = {}
    for run in runs:
        problem = train(run, str(target), reporter or Reporter(), notify)
        numbers[run.variant] = _measured(run, name, measurement, str(target), notify)
        facts[run.variant] = f"{run.trained_minutes:.1f} min, seed {run.config.seed}"
        if problem:
            facts[run.variant] += f", {problem}"
    where = f"{device_name(target)}, torch {torch.__version__}"
    used = [f"{scale.samples:,} samples"] if "samples" in experiment.measures else []
    if {"errors", "outliers"} & set(experiment.measures):
        used.append(f"{scale.images or 'all'} held-out images")
    how = "; ".join([f"{scale_name}: {scale.description}", *used, where])
    if settings:
        how += f"; {' '.join(settings)}"
    source = runs[0].config.data.source
    if source != DATASET:
        experiment = replace(experiment, title=f"{experiment.title}: the paper on CIFAR-10, here on {source}")
    table = make_table(experiment, numbers, facts, [*measurement.all_notes, how])
    for suffix, text in ((".md", table.markdown()), (".csv", table.csv()), (".html", table.html())):
        write_text(out / f"{name}-{scale_name}{suffix}", text)
    record: dict[str, Any] = {"experiment": name, "scale": scale_name, "numbers": numbers, "trained": facts}
    write_text(out / f"{name}-{scale_name}.json", to_json(record | {"notes": list(table.notes)}))
    return table


def check_device(scale_name: str, device: str) -> torch.device:
    """The device, if it is fast enough for the scale."""
    target = resolve_device(device)
    if scale_name != "smoke" and target.type != "cuda":
        description = SCALES[scale_name].description
        raise UserError(f"--scale {scale_name} needs a GPU: {description}. --scale smoke runs anywhere.")
    return target


def _measured(
    run: PaperRun, experiment: str, measurement: Measurement, device: str, notify: Callable[[str], None]
) -> dict[str, float | None]:
    """The numbers of a run; those of the same weights, measured in the same way, are kept in its folder."""
    sampling = {key: value for key, value in config_io.flatten(run.config).items() if key.startswith("sampling.")}
    features = measurement.features
    how = {
        "weights": digest(locate_snapshot(run.folder).path, "sha256").hexdigest(),
        "samples": measurement.scale.samples,
        "images": measurement.scale.images,
        "sampling": sampling,
        "features": None if features is None else [features.checksum, features.precision],
    }
    name = hashlib.sha256(to_json(how["sampling"]).encode()).hexdigest()[:8]  # runs that differ in it share a folder
    overrides = [f"{key}={'null' if value is None else value}" for key, value in sampling.items()]
    numbers: dict[str, float | None] = {}
    for kind in EXPERIMENTS[experiment].measures:
        file = run.folder / f"paper-{kind}-{name}.json"
        stored = _read(file)
        if stored.get("how") != how or not isinstance(stored.get("notes"), list):
            notify(f"measuring {run.folder.name}: {kind}")
            measurement.complete, measurement.notes = True, []
            try:
                found = MEASURES[kind](measurement, load(run.folder, device, overrides=overrides), run)
            except NotFinite as error:
                found = {}
                measurement.notes.append(f"{run.folder.name}: {first_line(error)}")
            stored = {"how": how, "numbers": found, "notes": measurement.notes}
            if measurement.complete:  # otherwise it is worth another try
                write_text(file, to_json(stored))
        numbers |= stored["numbers"]
        measurement.all_notes |= dict.fromkeys(stored["notes"])
    return numbers


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("numbers"), dict) else {}


def announce(runs: list[PaperRun], device: str, notify: Callable[[str], None]) -> None:
    """Say how long the runs will take and how much memory they need, from a few iterations of each."""
    total = 0.0
    for run in runs:
        seconds, memory = predict(run, device)
        iterations = run.config.train.images / run.config.train.batch
        total += seconds * iterations
        hours = seconds * iterations / 3600
        name = run.folder.name
        notify(f"{name}: {iterations:,.0f} iterations of {seconds:.3g} s, {hours:.1f} hours, {memory / 2**30:.1f} GiB")
    if runs:
        notify(f"all runs: {total / 3600:.1f} hours, less what is trained already; stop and continue at any time")


def predict(run: PaperRun, device: str) -> tuple[float, int]:
    """Seconds per iteration and peak memory, from a few iterations on random images."""
    config = run.config
    train_settings = replace(
        config.train, images=PREDICTION_ITERATIONS * config.train.batch, log_every=1, trackers=(), sample_every=10**15
    )
    images = torch.randint(0, 256, (max(1000, config.train.batch), *config.data.sample_shape), dtype=torch.uint8)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = trainer.train(
            replace(config, train=train_settings),
            Path(folder) / "run",
            device,
            data=images,
            reporter=Reporter(),
            on_log=lambda stats: times.append(time.monotonic()),
        )
    return times[-1] - times[-2], result.peak_memory
