"""Train variants of a preset, measure each, and print one table row per trial.

    python benchmarks/trials.py TRIALS.yaml --out FOLDER [-n N] [--jobs J] [--only NAME] [--device D] [--json]

TRIALS.yaml holds the settings that all trials share, and the changes of each:

    target: cifar10-simple
    settings: train.images=2000000
    trials:
      reference:
      weak-chain: teaching.x_chain.step_size=0.08 teaching.generator_sample_weight=750

Every trial is a run in FOLDER/NAME; its result is FOLDER/NAME/trial.json. A second call continues runs that were cut
off and does not repeat finished trials.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import common
import dualmcmc
from dualmcmc import config_io, data
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.data.store import ImageStore, SubsetStore
from dualmcmc.engine import trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import with_absolute_paths
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.health.history import Entry, curve, effective_lines
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.outliers import outliers
from dualmcmc.utils import safe_yaml
from dualmcmc.utils.device import resolve_device
from dualmcmc.utils.errors import Diverged, UserError, sanitize
from dualmcmc.utils.files import make_folder, to_json, write_text
from dualmcmc.utils.progress import show_progress
from dualmcmc.utils.reporter import make_reporter

LINES = 10  # of the log, whose mean is reported
MEMORISATION_IMAGES = 5000
STATISTICS = {"gap": "energy_gap", "slope": "energy_slope", "displacement": "x_displacement_rms"}


@dataclass(frozen=True)
class Trial:
    """One variant: its changes to the common settings, the config that results, and its run folder."""

    name: str
    changes: str
    config: Config
    root: Path

    @property
    def result_file(self) -> Path:
        """Where the result is saved."""
        return self.root / "trial.json"


def load_trials(path: Path, out: Path) -> list[Trial]:
    """The trials of a file, all of them validated."""
    try:
        content = safe_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"'{path}' is not valid YAML: {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("trials"), dict) or not content["trials"]:
        raise UserError(f"'{path}' has no trials: see --help.")
    if unknown := set(content) - {"target", "settings", "trials"}:
        key = sanitize(str(min(unknown, key=str)))
        raise UserError(f"'{path}': unknown key '{key}': use target, settings and trials.")
    if not isinstance(target := content.get("target"), str):
        raise UserError(f"'{path}': target must be the name of a preset or a settings file.")
    result = []
    for name, changes in content["trials"].items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_+-]{,99}", name):
            raise UserError(
                f"'{path}': '{sanitize(str(name))}' cannot be the name of a trial: use letters, digits, _, + and -."
            )
        try:
            shared, own = _split(content.get("settings")), _split(changes)
            config = with_absolute_paths(config_io.load_config(target, [*shared, *own]))
        except (UserError, ValueError) as error:
            raise UserError(f"'{path}', trial {name}: {error}") from None
        result.append(Trial(name, " ".join(own), config, out / name))
    return result


def _split(settings: Any) -> list[str]:
    """The settings of one line."""
    if settings is not None and not isinstance(settings, str):
        raise UserError("settings must be one line of KEY=VALUE.")
    return shlex.split(settings or "")


def check_settings(trial: Trial) -> None:
    """Raise `UserError` if the trial's folder contains a run with other settings."""
    stored = RunFolder(trial.root).config
    if stored.exists() and config_io.load_stored_config(stored) != trial.config:
        raise UserError(f"'{trial.root}' was trained with other settings: rename the trial, or choose another --out.")


def run_trial(trial: Trial, samples: int, device: str) -> None:
    """Train a trial, or continue it, measure it, and save the result."""
    folder = RunFolder(trial.root)
    result: dict[str, Any] = {"trial": trial.name, "changes": trial.changes, "samples": samples}
    try:
        trained = trainer.train(trial.config, trial.root, device, folder.has_states(), reporter=make_reporter())
    except Diverged as error:
        result["diverged"] = str(error)
    else:
        if trained.stop_reason != "finished":
            raise UserError(f"trial {trial.name} was stopped ({trained.stop_reason}): call again to continue.")
        result |= {"iterations": trained.iterations, "minutes": trained.seconds / 60}
        result |= measure(trial.root, samples, device)
    result |= log_statistics(effective_lines(read_log(folder.log)))
    write_text(trial.result_file, to_json(result))


def log_statistics(lines: Sequence[Entry]) -> dict[str, list[float]]:
    """Means over ten lines of the log, halfway and at the end."""
    result = {}
    for name, key in STATISTICS.items():
        values = [value for _, value in curve(lines, key)]
        parts = (values[max(0, end - LINES) : end] for end in (len(values) // 2, len(values)))
        result[name] = [statistics.fmean(part) for part in parts if part]
    return result


def measure(root: Path, samples: int, device: str) -> dict[str, Any]:
    """FID, and the AUROC of E between held-out and training images: 0.5 if it has not memorised the latter."""
    run = dualmcmc.load(root, device=device)
    images = data.load(run.trained_data)
    result: dict[str, Any] = timing.describe(run.config, run.device)
    if samples:
        found = evaluate(run, ["fid"], samples, images, progress=show_progress)
        result["fid"] = [*found.generator.values(), *found.ebm.values()]
    if images.test is not None:
        seen, unseen = (_some(store) for store in (images.train, images.test))
        result["memorisation"] = outliers(run, unseen, {"train": seen}, ["energy"]).numbers["train"]["energy"]["auroc"]
    return result


def _some(store: ImageStore) -> SubsetStore:
    order = np.random.default_rng(0).permutation(len(store))
    return SubsetStore(store, np.sort(order[:MEMORISATION_IMAGES]))


def run_all(trials: Sequence[Trial], args: argparse.Namespace) -> None:
    """Run trials, `args.jobs` at a time, each in a process of its own, which a signal stops too."""
    options = ["--out", args.out, "-n", args.n, "--device", args.device]
    processes: list[subprocess.Popen[bytes]] = []

    def run(trial: Trial) -> None:
        log = trial.root.with_suffix(".log")
        common.notify(f"{trial.name}: started, progress in {log}")
        with open(log, "ab") as output:
            words = [sys.executable, __file__, args.file, *options, "--only", trial.name]
            process = subprocess.Popen([*map(str, words)], stdout=output, stderr=output)
            processes.append(process)
            common.notify(f"{trial.name}: {'failed' if process.wait() else 'finished'}")

    with _sigterm_as_interrupt(), ThreadPoolExecutor(args.jobs) as pool:
        try:
            list(pool.map(run, trials))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()  # saves first
            raise
        except OSError as error:
            raise UserError(f"cannot write logs in '{args.out}': {error.strerror or error}.") from None


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def load_result(trial: Trial, samples: int) -> dict[str, Any] | None:
    """The result of a trial; None if there is none with this number of samples."""
    if not trial.result_file.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(trial.result_file.read_text(encoding="utf-8"))
        format_result({"trials": [result]})  # uses every entry
        valid = (result["trial"], result["changes"]) == (trial.name, trial.changes)
    except OSError as error:
        raise UserError(f"cannot read '{trial.result_file}': {error.strerror or error}.") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"'{trial.result_file}' is not the result of trial {trial.name}: remove it to measure again.")
    return result if result["samples"] == samples else None


def format_result(result: dict[str, Any]) -> str:
    """A Markdown table; pairs of numbers are FID of generator and EBM samples, else halfway and at the end."""
    samples = ", ".join(sorted({f"{row['samples']:,}" for row in result["trials"]}))
    heads = (
        "trial",
        "changes",
        "iterations (minutes)",
        f"FID generator, EBM ({samples} samples)",
        "gap",
        "slope",
        "displacement",
        "memorisation (AUROC)",
    )
    rows = [heads, ["---"] * len(heads), *map(_cells, result["trials"])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(row: dict[str, Any]) -> list[str]:
    def numbers(name: str, digits: int) -> str:
        return ", ".join(f"{float(value):.{digits}f}" for value in row.get(name, [])) or "–"

    return [
        row["trial"],
        f"`{row['changes']}`" if row["changes"] else "none",
        "diverged" if "diverged" in row else f"{row['iterations']:,} ({row['minutes']:.1f})",
        numbers("fid", 1),
        numbers("gap", 3),
        numbers("slope", 2),
        numbers("displacement", 4),
        f"{float(row['memorisation']):.3f}" if "memorisation" in row else "–",
    ]


def main() -> None:
    parser = common.Parser(__doc__, takes_config=False)
    parser.add_argument("file", type=Path, metavar="TRIALS.yaml", help="the trials")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the runs and results")
    parser.add_argument("-n", type=common.at_least(0), default=10_000, help="samples for FID (default: 10000; 0: none)")
    parser.add_argument("--jobs", type=common.at_least(1), default=1, help="trials at a time (default: 1)")
    parser.add_argument("--only", metavar="NAME", help="run this trial only, in this process")
    args = parser.parse_args()
    trials = [trial for trial in load_trials(args.file, args.out) if args.only in (None, trial.name)]
    if not trials:
        raise UserError(f"'{args.file}' has no trial '{sanitize(args.only)}'.")
    resolve_device(args.device)
    make_folder(args.out, "Choose another --out.")
    for trial in trials:
        check_settings(trial)
    missing = [trial for trial in trials if load_result(trial, args.n) is None]
    if args.only is None:
        run_all(missing, args)
    else:
        for trial in missing:
            run_trial(trial, args.n, args.device)
    rows = [row for row in (load_result(trial, args.n) for trial in trials) if row is not None]
    if rows:
        common.print_result({"trials": rows}, args.json, format_result)
    if len(rows) < len(trials):
        raise UserError(f"{len(trials) - len(rows)} of {len(trials)} trials failed: see the logs in '{args.out}'.")


if __name__ == "__main__":
    common.run(main)
