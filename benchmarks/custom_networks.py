"""Whether networks passed to `train` run as fast as the same networks described by settings.

python benchmarks/custom_networks.py [TARGET] [KEY=VALUE ...] [--iterations N] [--rounds N] [--device D] [--json]

Both train on the same random images with the whole engine, in turns; the rate is the median over the log intervals of
all rounds but the first interval of each, which compiles.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

import common
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.engine.trainer import train
from dualmcmc.nets import Trio, build
from dualmcmc.utils.device import resolve_device

IMAGES, INTERVALS = 5_000, 10


def measure(config: Config, device: str, iterations: int, rounds: int) -> dict[str, Any]:
    """Iterations per second of both, and their ratio."""
    config, images = common.train_on_noise(config, iterations, max(1, iterations // INTERVALS), IMAGES)
    rates: dict[str, list[float]] = {"settings": [], "passed": []}
    engines: dict[str, str] = {}
    for number in range(rounds):
        for name, measured in rates.items():
            networks = build(config) if name == "passed" else None
            engines[name], seen = _train(config, device, images, networks)
            measured += seen
            common.notify(f"round {number + 1}, {name}: {median(seen):.4g} iterations per second, {engines[name]}")
    medians = {name: median(measured) for name, measured in rates.items()}
    facts = timing.describe(config, resolve_device(device))
    return {**facts, "engines": engines, "rates": medians, "ratio": medians["passed"] / medians["settings"]}


def _train(config: Config, device: str, images: Tensor, networks: Trio | None) -> tuple[str, list[float]]:
    """The engine of a run, and its iterations per second in each log interval but the first."""
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            config,
            Path(folder) / "run",
            device,
            networks=networks,
            data=images,
            on_log=lambda stats: rates.append(stats["iterations_per_second"]),
        )
    return result.engine, rates[1:]


def format_result(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{name:<9} {rate:8.4g} it/s  {result['engines'][name]}" for name, rate in result["rates"].items()]
    return "\n".join([*lines, f"passed / settings: {result['ratio']:.3f}"])


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--iterations", type=common.at_least(2 * INTERVALS), default=500, help="of each run")
    parser.add_argument("--rounds", type=common.at_least(1), default=2)
    args = parser.parse_args()
    result = measure(common.load_config(args), args.device, args.iterations, args.rounds)
    common.print_result(result, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
