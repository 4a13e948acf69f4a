"""Make the statistics of a dataset that the package includes, so that FID needs no Inception pass over it.

    dualmcmc data fetch cifar10 && dualmcmc data fetch inception
    python benchmarks/reference_statistics.py cifar10 --features FOLDER [--device D] [--json]

Writes the moments of the training images' Inception features, the covariance's upper triangle in float32, and prints
the SHA-256 of these numbers, which belongs into `INCLUDED` of src/dualmcmc/tasks/fid.py, and the FID between training
and test images with exact and with rounded moments. FOLDER keeps the features, 500 images per file, so that an
interrupted call can be repeated: on two CPU cores it takes hours.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import common
from dualmcmc.data.catalog import find_dataset
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.resolve import open_stores
from dualmcmc.data.store import ImageStore
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks import fid
from dualmcmc.utils.device import resolve_device
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import atomic, expand_user, make_folder
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress

CHUNK = 500  # images per file of features


def moments(
    images: ImageStore, split: str, features: FeatureExtractor, folder: Path, progress: ProgressFactory = no_progress
) -> Moments:
    """The moments of a split's features, which are read from `folder` or added to it as SPLIT-FIRST.npy."""
    result = Moments(features.dimension)
    with progress(f"features of {split}", len(images), "images") as advance:
        for first in range(0, len(images), CHUNK):
            batch = images.take(np.arange(first, min(first + CHUNK, len(images))))
            path = folder / f"{split}-{first}.npy"
            if path.exists():
                rows = np.load(path)
                advance(len(batch))
            else:
                rows = features(batch, advance).cpu().numpy()
                with atomic(path) as temporary, open(temporary, "wb") as file:
                    np.save(file, rows)
            if rows.shape != (len(batch), features.dimension):
                raise UserError(f"'{path}' has shape {rows.shape}, expected {(len(batch), features.dimension)}.")
            result.add(torch.from_numpy(rows))
    return result


def make(
    name: str,
    features: FeatureExtractor,
    folder: Path,
    out: Path = fid.INCLUDED_FOLDER,
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """Write the statistics of a named dataset's training images into `out`, and compare them with the exact ones."""
    spec = ImageSpec(find_dataset(name).size, find_dataset(name).channels)
    stores = open_stores(name, None, ["train", "test"], spec, progress=progress)
    if set(stores) != {"train", "test"}:
        raise UserError(f"{name} has no test split to compare with.")
    what = {"source": name, "split": "train", "size": spec.size, "channels": spec.channels}
    what |= {"crop": spec.crop, "resize": spec.resize}
    exact = moments(stores["train"], "train", features, make_folder(folder), progress)
    key = fid.statistics_key(what, len(stores["train"]), stores["train"].checksum, features)
    file = make_folder(out) / fid.statistics_file(key)
    checksum = fid.write_statistics(file, key, exact, torch.float32)
    rounded = fid.read_statistics(file, key)
    assert rounded is not None
    test = moments(stores["test"], "test", features, folder, progress)
    return {
        "file": file.name,
        "bytes": file.stat().st_size,
        "sha256": checksum,
        "images": exact.count,
        "train_test_exact": frechet_distance(test, exact),
        "train_test_rounded": frechet_distance(test, rounded),
    }


def format_result(result: dict[str, Any]) -> str:
    """The result as text."""
    return (
        f"{result['file']}: {result['images']:,} images, {result['bytes']:,} bytes, SHA-256 {result['sha256']}\n"
        f"FID of the test images {result['train_test_rounded']:.7f}, with float64 {result['train_test_exact']:.7f}"
    )


def main() -> None:
    parser = common.Parser(__doc__, takes_config=False)
    parser.add_argument("dataset", help="a named dataset with a test split, such as cifar10")
    parser.add_argument("--features", type=expand_user, required=True, metavar="FOLDER", help="keeps the features")
    args = parser.parse_args()
    start = time.monotonic()
    features = fid.load_features(device=resolve_device(args.device))
    result = make(args.dataset, features, args.features, progress=show_progress)
    common.print_result({**result, "seconds": time.monotonic() - start}, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
