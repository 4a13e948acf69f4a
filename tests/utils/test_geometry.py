import pytest

from dualmcmc.utils.errors import UserError
from dualmcmc.utils.geometry import downsampling_stages


def test_downsampling_stages():
    sizes = {8: (4, 1), 28: (7, 2), 32: (4, 3), 64: (4, 4), 256: (4, 6)}
    assert {size: downsampling_stages(size) for size in sizes} == sizes
    for size in (7, 30, 33):
        with pytest.raises(UserError, match=f"data.size={size}"):
            downsampling_stages(size)
