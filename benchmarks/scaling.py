"""Predicts images a second on many GPUs from what one GPU was measured to do: `python benchmarks/scaling.py`.

Weak scaling: every GPU keeps its batch. An iteration on N GPUs takes what it takes on one, plus the all-reduce of all
gradients (not hidden behind anything, which is the worst case), plus what shared noise costs. Prints the tables of
docs/scaling.md; every constant can be given.
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

BUCKET = 25e6  # bytes that DDP sends off together
NORMALS = 0.68e-3 / (102_400 * 3072)  # seconds for one Gaussian number on an H200, many at once


class Job(NamedTuple):
    """A preset as it was measured on one GPU."""

    name: str
    seconds: float  # an iteration
    batch: int  # of one GPU
    parameters: int
    pixels: int  # numbers of an image
    steps: int = 30  # of the x-chain


JOBS = (
    Job("cifar10-simple-authors", 13.6e-3, 100, 14_690_435, 3 * 32 * 32),
    Job("cifar10-resnet", 136.8e-3, 100, 48_027_651, 3 * 32 * 32),
    Job("celebahq256", 169.5e-3, 32, 64_219_203, 3 * 256 * 256),
)


class Network(NamedTuple):
    """What connects the GPUs: bytes a second that an all-reduce gets through each, and seconds to begin one."""

    name: str
    bandwidth: float
    latency: float


def all_reduce(job: Job, gpus: int, network: Network) -> float:
    """Seconds for all gradients in float32: a ring sends each byte twice, but for one part in N."""
    if gpus == 1:
        return 0.0
    size = 4.0 * job.parameters
    starts = math.ceil(size / BUCKET) + 2  # buckets; and each network has one that is not full
    return 2 * (gpus - 1) / gpus * size / network.bandwidth + starts * network.latency * math.log2(gpus)


def noise(job: Job, gpus: int) -> float:
    """Seconds for the noise of all others that every process draws too, with engine.shared_noise."""
    return NORMALS * job.steps * job.pixels * job.batch * (gpus - 1)


def row(job: Job, gpus: int, network: Network) -> str:
    sent, drawn = all_reduce(job, gpus, network), noise(job, gpus)
    own, shared = job.seconds + sent, job.seconds + sent + drawn
    images = gpus * job.batch
    return (
        f"| {gpus:,} | {images:,} | {1000 * sent:.2f} | {images / own:,.0f} | {100 * job.seconds / own:.1f} % "
        f"| {1000 * drawn:.1f} | {100 * job.seconds / shared:.1f} % |"
    )


def bites(job: Job, network: Network, share: float = 0.1) -> str:
    """The smallest power of two at which communication, or shared noise, takes `share` of an iteration."""

    def first(cost: str) -> str:
        for power in range(1, 16):
            extra = all_reduce(job, 2**power, network) if cost == "sent" else noise(job, 2**power)
            if extra / (job.seconds + extra) > share:
                return f"{2**power:,} GPUs"
        return "beyond 32,768"

    return f"a tenth of an iteration goes into gradients from {first('sent')}, into shared noise from {first('drawn')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=float, default=200, metavar="GB/S", help="bandwidth of the fast network")
    parser.add_argument("--slow", type=float, default=10, metavar="GB/S", help="bandwidth of the slow network")
    parser.add_argument("--latency", type=float, default=15, metavar="US", help="microseconds a doubling of GPUs adds")
    given = parser.parse_args()
    networks = [
        Network(name, bandwidth * 1e9, given.latency * 1e-6)
        for name, bandwidth in (("fast", given.fast), ("slow", given.slow))
    ]
    for job in JOBS:
        for network in networks:
            print(f"\n**{job.name}**, {network.name} network ({network.bandwidth / 1e9:g} GB/s):\n")
            print("| GPUs | batch | gradients, ms | images/s | efficiency | shared noise, ms | efficiency with it |")
            print("| --- | --- | --- | --- | --- | --- | --- |")
            for power in range(0, 11) if network.name == "fast" else (3, 6, 10):
                print(row(job, 2**power, network))
            print(f"\n{bites(job, network)}.")


if __name__ == "__main__":
    main()
