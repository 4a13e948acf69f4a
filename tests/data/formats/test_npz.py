import tracemalloc
import zipfile

import numpy as np
import pytest

from dualmcmc.data.formats import npz
from dualmcmc.utils.errors import UserError
from tests.data.formats.common import IMAGES, read


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_channels_last_and_first(tmp_path, axes):
    np.savez(tmp_path / "a.npz", images=IMAGES.transpose(*axes))
    assert np.array_equal(read(tmp_path / "a.npz"), IMAGES)


def test_greyscale_and_odd_shapes(tmp_path):
    np.savez(tmp_path / "a.npz", IMAGES[..., 0])
    assert np.array_equal(read(tmp_path / "a.npz"), np.repeat(IMAGES[..., :1], 3, 3))
    for shape in ((2, 1, 16, 3), (2, 16, 1, 3), (2, 20, 10, 3)):
        np.savez(tmp_path / "b.npz", np.zeros(shape, np.uint8))
        assert read(tmp_path / "b.npz").shape == (2, 16, 16, 3)


def test_array_is_selected_by_shape_or_name(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, labels=np.arange(7), pictures=IMAGES)
    assert np.array_equal(read(path), IMAGES)
    np.savez(path, first=IMAGES, second=IMAGES[::-1])
    assert np.array_equal(read(tmp_path / "a.npz:second"), IMAGES[::-1])
    with pytest.raises(UserError, match=r"arrays of images \(first, second\): name one, as in '.*a\.npz:first'"):
        read(path)
    with pytest.raises(UserError, match=r"no array 'secnd', only first, second\. Did you mean 'second'"):
        read(tmp_path / "a.npz:secnd")


def test_array_larger_than_memory_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", np.zeros((1000, 32, 32, 3), np.uint8))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    monkeypatch.setattr(npz, "available_memory", lambda: 1_000_000)
    with pytest.raises(UserError, match=r"3\.07 MB, too much"):
        read(tmp_path / "a.npz")


def test_long_header_is_refused_before_it_is_read(tmp_path):
    """Version 2 of the format allows four gigabytes, which compress to almost nothing."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x02\x00" + (30_000_000).to_bytes(4, "little") + b" " * 30_000_000)
    tracemalloc.start()
    with pytest.raises(UserError, match="header is too long"):
        read(tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000
