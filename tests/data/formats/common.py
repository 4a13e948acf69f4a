"""Helpers of the format tests."""

import tarfile

import numpy as np

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data.images import ImageSpec
from tests.data.makers import encoded, image_folder, pixels

SPEC = ImageSpec(16, 3)
IMAGES = pixels(7, 16)


def read(path, skip_bad=False):
    """The images at `path`, (N, 16, 16, 3)."""
    return data.open_images(path, SPEC, skip_bad).tensor().permute(0, 2, 3, 1).numpy()


def load(**settings):
    """Training and test images of a config, (N, H, W, C)."""
    images = data.load(Data(**settings))
    return tuple(None if store is None else store.tensor().permute(0, 2, 3, 1).numpy() for store in images[:2])


def assert_equal(images, expected):
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(images, expected, strict=True))


def image_tar(path, compression):
    folder = image_folder(path.parent / "for-tar", IMAGES)
    with tarfile.open(path, f"w:{compression}") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"images/{file.name}")
        archive.add(__file__, "images/readme.txt")
    return path


def image_parquet(path, nested, column="image"):
    import pyarrow
    import pyarrow.parquet

    values = [encoded(image) for image in IMAGES]
    rows = [{"bytes": value, "path": None} for value in values] if nested else values
    pyarrow.parquet.write_table(pyarrow.table({"label": [0] * len(rows), column: rows}), path, row_group_size=3)
    return path
