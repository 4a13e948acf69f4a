"""How long people wait for the first iteration: with an empty compiler cache, and with a filled one.

python benchmarks/start.py [TARGET] [KEY=VALUE ...] [--sequential] [--device D] [--json]

Trains on random images in fresh processes, with a compiler cache of their own. `--sequential` compiles without parallel
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = time.monotonic()

import common  # noqa: E402
from dualmcmc.bench import timing  # noqa: E402
from dualmcmc.config import Config  # noqa: E402
from dualmcmc.engine import compile_worker  # noqa: E402
from dualmcmc.engine.compiler import CACHE_VARIABLE  # noqa: E402
from dualmcmc.engine.trainer import train  # noqa: E402
from dualmcmc.utils.device import resolve_device  # noqa: E402
from dualmcmc.utils.errors import UserError  # noqa: E402
from dualmcmc.utils.progress import Advance, Unit  # noqa: E402
from dualmcmc.utils.reporter import Reporter  # noqa: E402

ITERATIONS = 8  # on a GPU, the graph of an iteration is captured after the third
IMAGES = 1_000


class CompilationTimer(Reporter):
    """Times what training shows as "compiling"."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.progress = self._time

    @contextmanager
    def _time(self, task: str, total: int | None, unit: Unit) -> Iterator[Advance]:
        start = time.monotonic()
        yield lambda count: None
        if task == "compiling":
            self.seconds += time.monotonic() - start


def start_training(config: Config, device: str) -> dict[str, Any]:
    """Train for a few iterations: the seconds of imports and compilation, and until iterations have finished."""
    imported = time.monotonic() - START
    config, images = common.train_on_noise(config, ITERATIONS, 1, IMAGES)
    finished: list[float] = []
    timer = CompilationTimer()
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            config,
            Path(folder) / "run",
            device,
            data=images,
            reporter=timer,
            on_log=lambda stats: finished.append(time.monotonic() - START),
        )
    return {
        "engine": result.engine,
        "seconds": {
            "imports": imported,
            "compilation": timer.seconds,
            "first iteration": finished[0],
            f"{ITERATIONS} iterations": finished[-1],
        },
    }


def measure(config: Config, device: str, arguments: list[str]) -> dict[str, Any]:
    """Start training twice in processes that share a compiler cache."""
    starts = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, CACHE_VARIABLE: cache}
        for name in ("empty cache", "filled cache"):
            command = [sys.executable, __file__, *arguments, "--once", "--json"]
            process = subprocess.run(command, env=environment, capture_output=True, text=True)
            if process.returncode != 0:
                raise UserError(process.stderr.strip().rpartition("\n")[2].removeprefix("error: "))
            starts[name] = json.loads(process.stdout.splitlines()[-1])
            common.notify(f"{name}: {starts[name]['seconds']['first iteration']:.1f} s until the first iteration")
    return {**timing.describe(config, resolve_device(device)), "starts": starts}


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{result['preset']}, {timing.format_environment(result)}"]
    for name, start in result["starts"].items():
        seconds = ", ".join(f"{part} {value:.1f}" for part, value in start["seconds"].items())
        lines.append(f"{name:<13} {start['engine']}; seconds: {seconds}")
    return "\n".join(lines)


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--sequential", action="store_true", help="compile in one process")
    parser.add_argument("--once", action="store_true", help="start once in this process, with the user's own cache")
    args = parser.parse_args()
    config = common.load_config(args)
    if args.sequential:
        compile_worker.CORES_PER_WORKER = sys.maxsize
    if args.once:
        common.print_result(start_training(config, args.device), args.json, str)
    else:
        common.print_result(measure(config, args.device, sys.argv[1:]), args.json, format_result)


if __name__ == "__main__":
    common.run(main)
