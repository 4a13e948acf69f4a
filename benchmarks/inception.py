"""The speed of FID's network in each precision, and what the precision changes in FID.

"corrected" (`load_features(precision="auto")`): float16, and moments corrected by float32 features of some images.

python benchmarks/inception.py [RUN] [KEY=VALUE ...] [-n N] [--device D] [--json]

RUN is a trained run, by default the pretrained cifar10-simple. Compared are N of its generator and of its EBM samples,
N of its training images and its test images. The network is needed: `dualmcmc data fetch inception`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

import common
import dualmcmc
from dualmcmc.bench import timing
from dualmcmc.engine.distributed import SINGLE_PROCESS
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.metrics.inception import FeatureExtractor, Precision
from dualmcmc.tasks.fid import BATCH, FeatureSet, load_features
from dualmcmc.tasks.run import Run
from dualmcmc.utils.images import to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress

PRECISIONS = (*get_args(Precision), "auto")
PAIRS = (
    ("test", "train"),
    ("generator", "train"),
    ("EBM", "train"),
    ("generator", "EBM"),
    ("train, first half", "train, second half"),
)
WIDTH = 64  # of the table's first column


def gather_images(run: Run, count: int, progress: ProgressFactory = no_progress) -> dict[str, Tensor]:
    """The sets of images that are compared, as uint8."""
    splits = run.load_data(progress)
    train = splits.train.tensor()[:count]
    first, second = train.chunk(2)
    sets = {"train": train, "train, first half": first, "train, second half": second}
    if splits.test is not None:
        sets["test"] = splits.test.tensor()[:count]
    run.prepare(count, progress)
    batches = [(to_uint8(x_hat), to_uint8(x_rev)) for _, x_hat, x_rev in run.sample_batches(count)]
    sets["generator"], sets["EBM"] = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
    return sets


def moments(images: Tensor, features: FeatureExtractor) -> tuple[Moments, float]:
    """The moments of the features, and the seconds they took."""
    result = FeatureSet(features, keep=False, count=len(images))
    timing.synchronize(features.device)
    start = time.monotonic()
    for first in range(0, len(images), BATCH):
        result.add(images[first : first + BATCH], first)
    result.all_gather(SINGLE_PROCESS)
    timing.synchronize(features.device)
    return result.moments, time.monotonic() - start


def measure(
    run: Run, extractors: Sequence[FeatureExtractor], count: int, progress: ProgressFactory = no_progress
) -> dict[str, Any]:
    """Images per second and the distance of each pair of sets, per extractor; the first is the reference.

    "mixed" are the distances if only the first set of a pair is evaluated in this precision.
    """
    sets = gather_images(run, count, progress)
    pairs = [pair for pair in PAIRS if sets.keys() >= set(pair)]
    rows: list[dict[str, Any]] = []
    reference: dict[str, Moments] = {}
    for features in extractors:
        moments(sets["train"][: 2 * BATCH], features)  # warm-up
        measured = {}
        total = seconds = 0.0
        with progress(f"features in {features.precision}", sum(map(len, sets.values())), "images") as advance:
            for name, images in sets.items():
                measured[name], spent = moments(images, features)
                total, seconds = total + len(images), seconds + spent
                advance(len(images))
        reference = reference or measured
        rows.append(
            {
                "precision": "corrected" if features.exact is not None else features.precision,
                "images_per_second": total / seconds,
                "distances": {f"{a} - {b}": frechet_distance(measured[a], measured[b]) for a, b in pairs},
                "mixed": {f"{a} - {b}": frechet_distance(measured[a], reference[b]) for a, b in pairs},
            }
        )
    return {
        **timing.describe(run.config, run.device),
        "weights": run.source,
        "samples": count,
        "metric": extractors[0].metric_name,
        "rows": rows,
    }


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    reference = result["rows"][0]
    lines = [f"{result['samples']:,} images per set, {timing.format_environment(result)}"]
    lines.append(" ".join([f"{'':<{WIDTH}}", *(f"{row['precision']:>12}" for row in result["rows"])]))
    lines.append(
        " ".join([f"{'images/s':<{WIDTH}}", *(f"{row['images_per_second']:12,.0f}" for row in result["rows"])])
    )
    for kind, note in (("distances", ""), ("mixed", f", second in {reference['precision']}")):
        for pair, value in reference[kind].items():
            differences = [f"{row[kind][pair] - value:+12.5f}" for row in result["rows"][1:]]
            lines.append(" ".join([f"{result['metric'] + ' ' + pair + note:<{WIDTH}}", f"{value:12.5f}", *differences]))
    return "\n".join(lines)


def main() -> None:
    parser = common.Parser(__doc__, takes_config=False)
    parser.add_argument("run", nargs="?", default="cifar10-simple", help="a trained run (default: cifar10-simple)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="such as sampling.steps=30")
    parser.add_argument("-n", "--num", type=common.at_least(100), default=50_000, help="images per set")
    args = parser.parse_args()
    run = dualmcmc.load(args.run, args.device, overrides=args.settings)
    extractors = [load_features(device=run.device, precision=precision) for precision in PRECISIONS]
    result = measure(run, extractors, args.num, show_progress)
    common.print_result(result, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
