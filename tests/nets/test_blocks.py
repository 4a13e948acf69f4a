import pytest
import torch
import torch.nn.functional as F

from dualmcmc.nets.blocks import DownBlock, LatentProjection, PooledConv2d, UpBlock, Upsample, resnet_widths


def test_resnet_widths():
    assert resnet_widths(32, 512) == [512] * 4
    assert resnet_widths(64, 1024) == [1024, 512, 256, 128, 64]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_upsample_is_bilinear(size):
    x = torch.randn(1, 2, size, size + 1, dtype=torch.float64, requires_grad=True)
    torchs = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    ours = Upsample()(x)
    assert torch.allclose(ours, torchs, rtol=1e-12)
    cotangent = torch.randn_like(torchs)
    assert torch.allclose(*(torch.autograd.grad(y, x, cotangent)[0] for y in (ours, torchs)), rtol=1e-12)
    assert torch.autograd.gradgradcheck(Upsample(), x)


def test_shortcuts_commute_with_resizing():
    x = torch.randn(2, 3, 8, 8)
    down = DownBlock(3, 5, down=True)
    h = F.avg_pool2d(F.conv2d(F.relu(down.conv1(F.relu(x))), down.conv2.weight, padding=1), 2)
    assert torch.allclose(down(x), h + F.avg_pool2d(down.shortcut(x), 2), atol=1e-5)
    up = UpBlock(3, 5)
    h = up.conv2(F.relu(up.norm2(up.conv1(up.up(F.relu(up.norm1(x)))))))
    assert torch.allclose(up(x), h + up.shortcut(up.up(x)), atol=1e-5)


def test_pooled_convolution_is_convolution_then_pooling():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    layer = PooledConv2d(3, 5).double()
    plain = F.avg_pool2d(F.conv2d(x, layer.weight, padding=1), 2)
    assert torch.allclose(layer(x), plain)
    gradients = [torch.autograd.grad(y.sin().sum(), (x, layer.weight)) for y in (layer(x), plain)]
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


def test_latent_projection_is_a_transposed_convolution():
    z, layer = torch.randn(3, 6), LatentProjection(6, 5, 4)
    torch.nn.init.normal_(layer.bias)
    assert torch.allclose(layer(z), F.conv_transpose2d(z[:, :, None, None], layer.weight, layer.bias), atol=1e-6)
