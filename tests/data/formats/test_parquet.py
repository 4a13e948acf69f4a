import numpy as np

from tests.data.formats.common import IMAGES, image_parquet, read


def test_folder_of_shards(tmp_path):
    image_parquet(tmp_path / "0.parquet", nested=True)
    image_parquet(tmp_path / "1.parquet", nested=True)
    assert np.array_equal(read(tmp_path), np.concatenate([IMAGES, IMAGES]))
