"""Predict images per second on many GPUs from measurements on one: `python benchmarks/scaling.py`.

Weak scaling: the batch per GPU is constant. An iteration on N GPUs takes its time on one GPU, plus the all-reduce of
all gradients (the worst case: no overlap with computation), plus the cost of shared noise. Prints the tables of
docs/lab/scaling.md; the network's speed and latency are options.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

BUCKET = 25e6  # bytes per DDP bucket
SECONDS_PER_NORMAL = 0.68e-3 / (102_400 * 3072)  # to draw one Gaussian number on an H200, in large batches
MAX_POWER = 15  # up to 2^15 GPUs


class Job(NamedTuple):
    """A preset as measured on one GPU."""

    name: str
    seconds: float  # per iteration
    batch: int  # per GPU
    parameters: int
    values: int  # per image
    x_chain_steps: int = 30


JOBS = (
    Job("cifar10-simple-authors", 13.6e-3, 100, 14_690_435, 3 * 32 * 32),
    Job("cifar10-resnet", 136.8e-3, 100, 48_027_651, 3 * 32 * 32),
    Job("celebahq256", 169.5e-3, 32, 64_219_203, 3 * 256 * 256),
)


class Network(NamedTuple):
    """The network between the GPUs."""

    name: str
    bandwidth: float  # of an all-reduce, bytes per second per GPU
    latency: float  # seconds per doubling of the GPUs


def all_reduce_seconds(job: Job, gpus: int, network: Network) -> float:
    """All-reduce of all gradients in float32. A ring sends (N - 1) / N of the bytes twice."""
    if gpus == 1:
        return 0.0
    size = 4.0 * job.parameters
    buckets = math.ceil(size / BUCKET) + 2  # the last bucket of each of the three networks is not full
    return 2 * (gpus - 1) / gpus * size / network.bandwidth + buckets * network.latency * math.log2(gpus)


def shared_noise_seconds(job: Job, gpus: int) -> float:
    """With engine.shared_noise, every process also draws the noise of all others."""
    return SECONDS_PER_NORMAL * job.x_chain_steps * job.values * job.batch * (gpus - 1)


def format_row(job: Job, gpus: int, network: Network) -> str:
    gradients, noise = all_reduce_seconds(job, gpus, network), shared_noise_seconds(job, gpus)
    without_noise = job.seconds + gradients
    images = gpus * job.batch
    return (
        f"| {gpus:,} | {images:,} | {1000 * gradients:.2f} | {images / without_noise:,.0f} "
        f"| {100 * job.seconds / without_noise:.1f} % | {1000 * noise:.1f} "
        f"| {100 * job.seconds / (without_noise + noise):.1f} % |"
    )


def format_limits(job: Job, network: Network, fraction: float = 0.1) -> str:
    """The smallest powers of two at which gradients, or shared noise, take more than `fraction` of an iteration."""

    def limit(extra: list[float]) -> str:
        for power, seconds in enumerate(extra, start=1):
            if seconds / (job.seconds + seconds) > fraction:
                return f"from {2**power:,} GPUs"
        return f"beyond {2**MAX_POWER:,} GPUs"

    counts = [2**power for power in range(1, MAX_POWER + 1)]
    gradients = limit([all_reduce_seconds(job, gpus, network) for gpus in counts])
    noise = limit([shared_noise_seconds(job, gpus) for gpus in counts])
    return f"More than {fraction:.0%} of an iteration: gradients {gradients}, shared noise {noise}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=float, default=200, metavar="GB/S", help="bandwidth of the fast network")
    parser.add_argument("--slow", type=float, default=10, metavar="GB/S", help="bandwidth of the slow network")
    parser.add_argument("--latency", type=float, default=15, metavar="US", help="microseconds per doubling of the GPUs")
    args = parser.parse_args()
    for job in JOBS:
        for name, bandwidth, powers in (("fast", args.fast, range(11)), ("slow", args.slow, (3, 6, 10))):
            network = Network(name, bandwidth * 1e9, args.latency * 1e-6)
            print(f"\n**{job.name}**, {name} network ({bandwidth:g} GB/s):\n")
            print("| GPUs | batch | gradients, ms | images/s | efficiency | shared noise, ms | efficiency with it |")
            print("| --- | --- | --- | --- | --- | --- | --- |")
            for power in powers:
                print(format_row(job, 2**power, network))
            print(f"\n{format_limits(job, network)}")


if __name__ == "__main__":
    main()
