"""Time of one training iteration for each preset, eagerly, on random bytes of the preset's size.

python benchmarks/iteration.py --device cuda cifar10-simple cifar10-resnet celeba64
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from dualmcmc import settings
from dualmcmc.engine.device import describe, make_repeatable, pick
from dualmcmc.engine.state import TrainState
from dualmcmc.methods.dual_mcmc import step
from dualmcmc.nets import parameter_counts
from dualmcmc.pictures import from_uint8


def measure(preset: str, overrides: list[str], device: torch.device, iterations: int) -> dict:
    config = settings.load_config(preset, overrides)
    make_repeatable(device, config.train.deterministic)
    state = TrainState(config, device)
    shape = (config.train.batch, config.data.channels, config.data.size, config.data.size)
    x = from_uint8(torch.randint(0, 256, shape, dtype=torch.uint8)).to(device)

    def run(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            stats = step(state.trio, state.optimizers, x, state.rng, config.teaching)
            state.ema.update(1000, config.train.batch)
        assert all(value.isfinite() for value in stats.values()), stats  # waits for the device
        return (time.perf_counter() - begun) / count

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run(2)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")  # an iteration must not wait for the device
        step(state.trio, state.optimizers, x, state.rng, config.teaching)
        torch.cuda.set_sync_debug_mode("default")
    seconds = run(iterations)
    return {
        "preset": preset,
        "overrides": overrides,
        "batch": config.train.batch,
        "ms_per_iteration": round(1000 * seconds, 1),
        "images_per_second": round(config.train.batch / seconds, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "parameters": parameter_counts(state.trio),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["digits"])
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", help="KEY=VALUE, for all presets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--iterations", type=int, default=10)
    arguments = parser.parse_args()
    device = pick(arguments.device)
    print(json.dumps({"device": describe(device), "torch": torch.__version__}))
    for preset in arguments.presets:
        print(json.dumps(measure(preset, arguments.overrides, device, arguments.iterations)), flush=True)


if __name__ == "__main__":
    main()
