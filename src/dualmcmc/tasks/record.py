"""Write results with everything needed to repeat them: one JSON file per result, in the run folder."""

from __future__ import annotations

import importlib.metadata
import json
import math
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
from dualmcmc.tasks.run import Run
from dualmcmc.utils.device import device_name
from dualmcmc.utils.errors import CannotWrite
from dualmcmc.utils.files import make_folder, to_json, write_text

REMEDY = "Reduce sampling.step_size, sampling.temperature or sampling.steps, or those of teaching.z_chain."


def is_finite(value: Any) -> bool:
    """Whether a result contains no NaN and no infinity."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def describe_run(run: Run) -> dict[str, Any]:
    """The run that was used: its weights, its chains and its execution."""
    sampling = run.config.sampling
    return {
        "seed": run.seed,
        "run": {
            "preset": run.config.preset,
            "images": run.images,
            "ema": run.ema,
            "file": run.source,
            "sha256": run.sha256,
        },
        "x_chain": asdict(run.config.sampling_chain) | {"noise_std": run.config.sampling_chain.noise_std},
        "z_chain": asdict(run.config.teaching.z_chain) | {"sigma": run.config.teaching.sigma},
        "batchnorm": sampling.batchnorm,
        "batch": sampling.batch,
        "engine": run.engine,
    }


def describe_call(task: str, seconds: float, device: torch.device) -> dict[str, Any]:
    """The task, the process that ran it, and its duration."""
    return {"task": task, **describe_process(device), "seconds": round(seconds, 3)}


def describe_process(device: torch.device) -> dict[str, Any]:
    """Command line, time, versions and device of this process."""
    return {
        "command": _command(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "dualmcmc": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device_name(device),
    }


def _command() -> str:
    """The command line of this process, which may be the command or a user's script."""
    is_command = Path(sys.argv[0]).name in ("dualmcmc", "__main__.py")
    return shlex.join(["dualmcmc" if is_command else sys.argv[0], *sys.argv[1:]])


def entry(run: Run, task: str, seconds: float, numbers: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A result as it is saved. `facts`: its circumstances, such as the number of samples, the data, the picture."""
    return {**describe_call(task, seconds, run.device), "numbers": numbers, **facts, **describe_run(run)}


def save(result: dict[str, Any], folder: Path) -> Path:
    """Write a result into `folder` under a new name."""
    if folder.is_symlink():
        raise CannotWrite(f"cannot write into '{folder}': it is a link.")
    make_folder(folder, "Results are written there.")
    stamp = str(result["time"]).replace("-", "").replace(":", "")
    path = folder / f"{result['task']}-{stamp}.json"
    number = 1
    while True:
        try:
            path.touch(exist_ok=False)  # reserves the name, in case another process ends at the same time
            break
        except FileExistsError:
            number += 1
            path = folder / f"{result['task']}-{stamp}-{number}.json"
        except OSError as error:
            raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None
    write_text(path, json.dumps(json.loads(to_json(result)), indent=2) + "\n")
    return path


def commit() -> str | None:
    """The commit of this package's source, with "+" if files have changed since; None if unknown."""
    here = Path(__file__).resolve()

    def git(*args: str) -> str:
        command = ["git", "-C", str(here.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed package may be inside another repository
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here.parents[1])) else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_commit()


def _installed_commit() -> str | None:
    """The commit that pip installed from."""
    try:
        text = importlib.metadata.distribution("dualmcmc").read_text("direct_url.json")
        commit_id = json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
        return str(commit_id) if commit_id else None
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
