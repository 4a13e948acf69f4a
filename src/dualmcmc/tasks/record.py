"""What was measured, with all that is needed to repeat it: one JSON file a measurement, in the run folder."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dualmcmc import __version__
from dualmcmc.engine.device import describe
from dualmcmc.errors import CannotWrite
from dualmcmc.files import make_folder, to_json, write_text
from dualmcmc.published import home_of
from dualmcmc.tasks.run import Run

FOLDER = "results"


def folder_for(run: Path) -> Path:
    """Where the results of a run folder, of a snapshot beside it, or of published weights lie."""
    return home_of(run) / FOLDER


def describe_run(run: Run) -> dict[str, Any]:
    """What was measured: the run, its weights, its chains, and where."""
    sampling = run.config.sampling
    return {
        "seed": run.seed,
        "run": {
            "preset": run.config.preset,
            "images": run.images,
            "ema": run.ema,
            "file": None if run.file is None else str(run.file),
            "sha256": run.sha256,
        },
        "x_chain": asdict(run.config.sampling_chain) | {"noise_std": run.config.sampling_chain.noise_std},
        "z_chain": asdict(run.config.teaching.z_chain) | {"sigma": run.config.teaching.sigma},
        "batchnorm": sampling.batchnorm,
        "batch": sampling.batch,
        "engine": run.engine,
    }


def describe_call(task: str, seconds: float, device: torch.device) -> dict[str, Any]:
    """What was done, by which call, and how long it took."""
    return {"task": task, **describe_process(device), "seconds": round(seconds, 3)}


def describe_process(device: torch.device) -> dict[str, Any]:
    """How this process was called, when, with which versions, and where."""
    return {
        "command": _command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dualmcmc": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": describe(device),
    }


def _command() -> str:
    """How this process was called: as the command, or as a script of one's own."""
    own = Path(sys.argv[0]).name in ("dualmcmc", "__main__.py")
    return shlex.join(["dualmcmc" if own else sys.argv[0], *sys.argv[1:]])


def entry(run: Run, task: str, seconds: float, numbers: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A measurement as it is recorded. `facts`: what else belongs to it, such as samples, data and pictures."""
    return {**describe_call(task, seconds, run.device), "numbers": numbers, **facts, **describe_run(run)}


def save(made: dict[str, Any], folder: Path) -> Path:
    """Write an entry into `folder`, under a name of its own; nothing is overwritten."""
    make_folder(folder, "Results are written there.")
    stamp = str(made["time"]).replace("-", "").replace(":", "")
    path = folder / f"{made['task']}-{stamp}.json"
    number = 1
    while True:
        try:
            path.touch(exist_ok=False)  # taken: another process that ends now takes the next
            break
        except FileExistsError:
            number += 1
            path = folder / f"{made['task']}-{stamp}-{number}.json"
        except OSError as error:
            raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None
    write_text(path, json.dumps(json.loads(to_json(made)), indent=2) + "\n")
    return path


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Every measurement in a folder, oldest first; what is no measurement is left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            made = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(made, dict) and {"task", "time"} <= made.keys() and isinstance(made.get("numbers"), dict):
            found.append(made)
    return sorted(found, key=lambda made: str(made["time"]))


def commit() -> str | None:
    """The commit of this package's own source, with "+" where files were changed since; None where there is none."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here.parent), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # another project may be around an installed package
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here.parents[1])) else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_commit()


def _installed_commit() -> str | None:
    """The commit pip installed from."""
    try:
        text = importlib.metadata.distribution("dualmcmc").read_text("direct_url.json")
        found = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        return str(found) if found else None
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
