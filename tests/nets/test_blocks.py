import pytest
import torch
import torch.nn.functional as F

from dualmcmc.config import stages
from dualmcmc.errors import UserError
from dualmcmc.nets.blocks import DownBlock, UpBlock, Upsample, resnet_widths


def test_stages_and_widths():
    assert {size: stages(size) for size in (8, 28, 32, 64, 256)} == {
        8: (4, 1), 28: (7, 2), 32: (4, 3), 64: (4, 4), 256: (4, 6),
    }  # fmt: skip
    assert resnet_widths(32, 512) == [512] * 4
    assert resnet_widths(64, 1024) == [1024, 512, 256, 128, 64]
    with pytest.raises(UserError, match=r"data.size=30"):
        stages(30)


def test_bilinear_as_matrix_products_is_the_interpolation():
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    ours = Upsample(5).double()(x)
    assert torch.allclose(ours, F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), atol=1e-6)


def test_shortcuts_in_the_cheap_order_are_the_same_function():
    x = torch.randn(2, 3, 8, 8)
    down = DownBlock(3, 5, down=True)
    h = F.avg_pool2d(down.conv2(F.relu(down.conv1(F.relu(x)))), 2)
    assert torch.allclose(down(x), h + F.avg_pool2d(down.shortcut(x), 2), atol=1e-5)
    up = UpBlock(3, 5, 8)
    h = up.conv2(F.relu(up.norm2(up.conv1(up.up(F.relu(up.norm1(x)))))))
    assert torch.allclose(up(x), h + up.shortcut(up.up(x)), atol=1e-5)
