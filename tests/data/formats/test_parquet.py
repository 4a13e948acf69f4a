import numpy as np
import pyarrow
import pyarrow.parquet as parquet

from dualmcmc.data.formats.parquet import open_parquet
from tests.data.formats.common import IMAGES, image_parquet, read


def test_folder_of_shards(tmp_path):
    image_parquet(tmp_path / "0.parquet", nested=True)
    image_parquet(tmp_path / "1.parquet", nested=True)
    assert np.array_equal(read(tmp_path), np.concatenate([IMAGES, IMAGES]))


def test_one_value_in_memory_at_a_time(tmp_path):
    """A dictionary of one value of a megabyte makes 64 of them in a file of a few kilobytes."""
    table = pyarrow.table({"image": pyarrow.array([bytes(1_000_000)] * 64, pyarrow.binary())})
    parquet.write_table(table, tmp_path / "bomb.parquet", compression="zstd")
    assert (tmp_path / "bomb.parquet").stat().st_size < 50_000
    pyarrow.default_memory_pool().release_unused()
    before, most = pyarrow.total_allocated_bytes(), 0
    names = []
    for name, _ in open_parquet(tmp_path, [tmp_path / "bomb.parquet"])._listing():
        names.append(name)
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert len(names) == 64
    assert most < 16_000_000
