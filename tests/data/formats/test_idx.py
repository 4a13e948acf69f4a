import numpy as np
import pytest

from dualmcmc.data.images import ImageSpec, convert
from dualmcmc.utils.errors import UserError
from tests.data import makers
from tests.data.formats.common import assert_equal, load
from tests.data.makers import pixels


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_plain_and_gzipped_files(cache, name):
    splits = pixels(6, 28, 1), pixels(3, 28, 1, seed=1)
    makers.mnist(cache / name, *splits)
    assert_equal(load(source=name, size=28, channels=1), splits)
    assert_equal(load(source=name, size=28, channels=1, path=str(cache / name)), splits)
    enlarged, _ = load(source=name, size=32, channels=3)
    assert np.array_equal(enlarged[0], convert(splits[0][0], ImageSpec(32, 3)))


@pytest.mark.parametrize("content", [b"", b"\0\0\x08\x01" + b"\0" * 20, makers.idx(pixels(2, 28, 1))[:-1], b"\0" * 16])
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError, match="train-images"):
        load(source="mnist", size=28, channels=1, path=str(tmp_path))
