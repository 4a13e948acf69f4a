import pytest
import torch
import torch.nn.functional as F

from dualmcmc.nets.blocks import (
    DownBlock,
    LatentProjection,
    PooledConv2d,
    StyledConv,
    UpBlock,
    Upsample,
    resnet_widths,
    unit_leaky_relu,
    unit_linear,
)


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


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("weight_scale", [0.1, 10])
def test_styled_convolution_keeps_the_signal(up, weight_scale):
    layer = StyledConv(64, 96, 16, up)
    with torch.no_grad():
        layer.conv.weight.mul_(weight_scale)
        scale = 1 + layer.scale(style := torch.randn(8, 16))
        output = layer(torch.randn(8, 64, 16, 16), style)
    assert scale.std() == pytest.approx(0.5, rel=0.2)
    assert output.shape[2:] == ((32, 32) if up else (16, 16))
    inside = output[:, :, 2:-2, 2:-2]  # the border sees zeros
    assert inside.square().mean().sqrt() == pytest.approx(1, rel=0.05)


def test_style_scales_input_channels():
    layer, x = StyledConv(3, 5, 2), torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        layer.scale.bias[0] = -1  # the first channel is ignored for a style of zeros
        ignored = layer(x + torch.tensor([9.0, 0, 0])[:, None, None], torch.zeros(1, 2))
        assert torch.allclose(layer(x, torch.zeros(1, 2)), ignored, atol=1e-6)
        assert not torch.allclose(layer(x, torch.ones(1, 2)), ignored, atol=1e-2)


def test_unit_scales():
    x = torch.randn(2000, 100)
    assert unit_linear(100, 50, std=0.3)(x).detach().std() == pytest.approx(0.3, rel=0.05)
    assert unit_leaky_relu(x).square().mean() == pytest.approx(1, rel=0.02)
