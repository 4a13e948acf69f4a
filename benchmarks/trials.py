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
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import common
import dualmcmc
from dualmcmc import config_io, data
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.data.store import ImageStore, SubsetStore
from dualmcmc.engine import trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.health.history import Entry, curve, effective_lines
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.outliers import outliers
from dualmcmc.utils import safe_yaml
from dualmcmc.utils.errors import Diverged, UserError, sanitize
from dualmcmc.utils.files import make_folder, to_json, write_text
from dualmcmc.utils.progress import make_reporter, show_progress

LINES = 10  # of the log, whose mean is reported
MEMORISATION_IMAGES = 5000
STATISTICS = {"gap": "energy_gap", "slope": "energy_slope", "displacement": "x_displacement_rms"}


@dataclass(frozen=True)
class Trial:
    """One variant: its changes to the common settings, and the config that results."""

    name: str
    changes: str
    config: Config


def load_trials(path: Path) -> list[Trial]:
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
    common_settings = _words(path, "settings", content.get("settings"))
    result = []
    for name, changes in content["trials"].items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
            raise UserError(f"'{path}': '{sanitize(str(name))}' cannot be the name of a trial and its folder.")
        own = _words(path, name, changes)
        config = config_io.load_config(str(content.get("target", "digits")), [*common_settings, *own])
        result.append(Trial(name, " ".join(own), config))
    return result


def _words(path: Path, key: str, text: Any) -> list[str]:
    if text is not None and not isinstance(text, str):
        raise UserError(f"'{path}': {sanitize(key)} must be a line of KEY=VALUE settings.")
    return (text or "").split()


def check_settings(trial: Trial, root: Path) -> None:
    """Raise `UserError` if the run in `root` has other settings than the trial."""
    folder = RunFolder(root)
    if folder.config.exists():
        stored = config_io.load_stored_config(folder.config)
        # Paths are stored as absolute ones.
        images = replace(trial.config.data, path=stored.data.path, test_path=stored.data.test_path)
        if replace(trial.config, data=images) != stored:
            raise UserError(f"'{root}' was trained with other settings: rename the trial, or choose another --out.")


def run_trial(trial: Trial, root: Path, samples: int, device: str) -> dict[str, Any]:
    """Train a trial, or continue it, and measure it; the result is saved."""
    folder = RunFolder(root)
    result: dict[str, Any] = {"trial": trial.name, "changes": trial.changes}
    try:
        trained = trainer.train(trial.config, root, device, folder.has_states(), reporter=make_reporter())
    except Diverged as error:
        result["diverged"] = str(error)
    else:
        if trained.stop_reason != "finished":
            raise UserError(f"trial '{trial.name}' was stopped ({trained.stop_reason}): call again to continue.")
        result |= {"iterations": trained.iterations, "minutes": trained.seconds / 60}
        result |= measure(root, samples, device)
    result |= log_statistics(effective_lines(read_log(folder.log)))
    write_text(_result_file(root), to_json(result))
    return result


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
        result |= {"samples": samples, "generator": found.generator, "ebm": found.ebm}
    if images.test is not None:
        seen, unseen = (_some(store) for store in (images.train, images.test))
        result["memorisation"] = outliers(run, unseen, {"train": seen}, ["energy"]).numbers["train"]["energy"]["auroc"]
    return result


def _some(store: ImageStore) -> SubsetStore:
    order = np.random.default_rng(0).permutation(len(store))
    return SubsetStore(store, np.sort(order[:MEMORISATION_IMAGES]))


def run_all(trials: Sequence[Trial], args: argparse.Namespace) -> None:
    """Run the trials that have no result yet, `args.jobs` at a time, each in a process of its own."""

    def start(trial: Trial) -> None:
        log = args.out / f"{trial.name}.log"
        options = ["--out", args.out, "-n", args.n, "--device", args.device, "--only", trial.name]
        with open(log, "a", encoding="utf-8") as output:
            code = subprocess.run(
                [sys.executable, __file__, args.file, *map(str, options)], stdout=output, stderr=output
            ).returncode
        common.notify(f"{trial.name}: {'done' if code == 0 else f'failed, see {log}'}")

    missing = [trial for trial in trials if not _result_file(args.out / trial.name).exists()]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(start, missing))


def load_result(path: Path) -> dict[str, Any]:
    """The result of a finished trial."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        format_row(result)  # uses every entry
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror or error}.") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"'{path}' is not the result of a trial: remove it to repeat the trial.") from None
    return result


def format_row(result: dict[str, Any]) -> str:
    """A row of the table."""

    def numbers(name: str, digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in result[name])

    if "diverged" in result:
        length, fid = "diverged", "–"
    else:
        length = f"{result['iterations']:,} ({result['minutes']:.1f})"
        kinds = (next(iter(result[kind].values())) for kind in ("generator", "ebm") if kind in result)
        fid = " / ".join(f"{value:.1f}" for value in kinds) or "–"
    memorisation = f"{result['memorisation']:.3f}" if "memorisation" in result else "–"
    changes = f"`{result['changes']}`" if result["changes"] else "none"
    cells = (changes, length, fid, numbers("gap", 3), numbers("slope", 2), numbers("displacement", 4), memorisation)
    return " | ".join([f"| {result['trial']}", *cells]) + " |"


def format_result(result: dict[str, Any]) -> str:
    """A Markdown table; pairs of numbers are halfway and at the end."""
    counts = {row["samples"] for row in result["trials"] if "samples" in row}
    fid = f"FID generator / EBM, {', '.join(f'{count:,}' for count in sorted(counts))} samples" if counts else "FID"
    heads = ("trial", "changes", "iterations (minutes)", fid, "gap", "slope", "displacement", "memorisation (AUROC)")
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    return "\n".join([*lines, *map(format_row, result["trials"])])


def _result_file(root: Path) -> Path:
    return root / "trial.json"


def main() -> None:
    parser = common.Parser(__doc__, takes_config=False)
    parser.add_argument("file", type=Path, metavar="TRIALS.yaml", help="the trials")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the runs and results")
    parser.add_argument("-n", type=common.at_least(0), default=10_000, help="samples for FID (default: 10000; 0: none)")
    parser.add_argument("--jobs", type=common.at_least(1), default=1, help="trials at a time (default: 1)")
    parser.add_argument("--only", metavar="NAME", help="run this trial only, in this process")
    args = parser.parse_args()
    trials = load_trials(args.file)
    if args.only is not None:
        trials = [trial for trial in trials if trial.name == args.only]
        if not trials:
            raise UserError(f"'{args.file}' has no trial '{sanitize(args.only)}'.")
    make_folder(args.out, "Choose another --out.")
    for trial in trials:
        check_settings(trial, args.out / trial.name)
    if args.only is None:
        run_all(trials, args)
    elif not _result_file(args.out / args.only).exists():
        run_trial(trials[0], args.out / args.only, args.n, args.device)
    files = [_result_file(args.out / trial.name) for trial in trials]
    rows = [load_result(file) for file in files if file.exists()]
    common.print_result({"trials": rows}, args.json, format_result)
    if len(rows) < len(trials):
        raise UserError(f"{len(trials) - len(rows)} of {len(trials)} trials are not finished: call again to continue.")


if __name__ == "__main__":
    common.run(main)
