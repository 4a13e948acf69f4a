import copy

import pytest
import torch
import torch.nn.functional as F

from dualmcmc.config import stages
from dualmcmc.errors import UserError
from dualmcmc.nets.blocks import (
    Conv2d,
    ConvTranspose2d,
    DownBlock,
    FromLatents,
    PooledConv2d,
    UpBlock,
    Upsample,
    convolve_image,
    resnet_widths,
    taken_by,
)


def test_stages_and_widths():
    assert {size: stages(size) for size in (8, 28, 32, 64, 256)} == {
        8: (4, 1), 28: (7, 2), 32: (4, 3), 64: (4, 4), 256: (4, 6),
    }  # fmt: skip
    assert resnet_widths(32, 512) == [512] * 4
    assert resnet_widths(64, 1024) == [1024, 512, 256, 128, 64]
    with pytest.raises(UserError, match=r"data.size=30"):
        stages(30)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_up_is_the_bilinear_interpolation(size):
    x = torch.randn(2, 3, size, size + 1, dtype=torch.float64, requires_grad=True)
    plain = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    ours = Upsample()(x)
    assert torch.allclose(ours, plain, rtol=1e-12)
    push = torch.randn_like(plain)
    assert torch.allclose(*(torch.autograd.grad(y, x, push)[0] for y in (ours, plain)), rtol=1e-12)
    assert torch.autograd.gradgradcheck(Upsample(), x)


def test_shortcuts_in_the_cheap_order_are_the_same_function():
    x = torch.randn(2, 3, 8, 8)
    down = DownBlock(3, 5, down=True)
    h = F.avg_pool2d(F.conv2d(F.relu(down.conv1(F.relu(x))), down.conv2.weight, padding=1), 2)
    assert torch.allclose(down(x), h + F.avg_pool2d(down.shortcut(x), 2), atol=1e-5)
    up = UpBlock(3, 5)
    h = up.conv2(F.relu(up.norm2(up.conv1(up.up(F.relu(up.norm1(x)))))))
    assert torch.allclose(up(x), h + up.shortcut(up.up(x)), atol=1e-5)


def test_pooling_folded_into_a_convolution_is_the_same_function():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    layer = PooledConv2d(3, 5).double()
    plain = F.avg_pool2d(F.conv2d(x, layer.weight, padding=1), 2)
    assert torch.allclose(layer(x), plain)
    gradients = [torch.autograd.grad(y.sin().sum(), (x, layer.weight)) for y in (layer(x), plain)]
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))
    folded = copy.deepcopy(layer)
    folded.weight = torch.nn.Parameter(layer.kernel().detach())  # weights given as 4x4 are used as they are
    assert torch.allclose(folded(x), plain)


def test_the_first_map_of_a_latent_is_a_transposed_convolution():
    z, layer = torch.randn(3, 6), FromLatents(6, 5, 4)
    torch.nn.init.normal_(layer.bias)
    plain = F.conv_transpose2d(z[:, :, None, None], layer.weight, layer.bias)
    assert torch.allclose(layer(z), plain, atol=1e-6)


@pytest.mark.parametrize(("channels", "side"), [(1, 3), (3, 3), (3, 1)])
def test_an_image_loses_nothing_to_coarse_weights(channels, side):
    x = (torch.rand(2, channels, 8, 8) * 2 - 1).requires_grad_()
    layer = Conv2d(channels, 16, side, padding=side // 2)
    torch.nn.init.normal_(layer.bias)
    coarse = copy.deepcopy(layer).bfloat16()
    plain = F.conv2d(x, coarse.weight.float(), coarse.bias.float(), padding=side // 2)
    made = coarse(x)
    assert made.dtype == torch.bfloat16
    assert torch.allclose(made.float(), plain, rtol=2**-7, atol=2**-8)
    push = torch.randn_like(plain).bfloat16()
    ours = torch.autograd.grad(made, (x, coarse.weight, coarse.bias), push)
    theirs = torch.autograd.grad(plain, (x, coarse.weight, coarse.bias), push.float())
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.float(), other.float(), rtol=0.03, atol=0.03 * other.float().abs().max())


@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "side", "bias"), [(1, 3, True), (3, 3, True), (3, 1, False), (4, 5, False)])
def test_an_image_made_with_coarse_weights(channels, side, bias, features):
    h = torch.randn(2, 16, 6, 8).bfloat16().to(features).requires_grad_()
    layer = Conv2d(16, channels, side, padding=side // 2, bias=bias).bfloat16()
    leaves = h, *layer.parameters()
    offset = layer.bias.float() if bias else None
    plain = F.conv2d(h.float(), layer.weight.float(), offset, padding=side // 2)
    made = layer(h)
    assert made.dtype == torch.float32
    assert torch.allclose(made, plain, rtol=2**-7, atol=2**-7)
    push = torch.randn_like(plain)
    for mine, other in zip(
        torch.autograd.grad(made, leaves, push), torch.autograd.grad(plain, leaves, push), strict=True
    ):
        assert torch.allclose(mine.float(), other.float(), rtol=0.03, atol=0.01 * other.float().abs().max())


@pytest.mark.parametrize(
    ("inside", "outside", "side", "padding", "dtype"),
    [
        (8, 3, 3, 1, torch.float32),  # finer weights: nothing is special
        (3, 8, 3, 1, torch.float32),
        (8, 5, 3, 1, torch.bfloat16),  # no image
        (8, 3, 3, 0, torch.bfloat16),  # another size
        (8, 3, 2, 1, torch.bfloat16),
        (8, 3, (3, 5), (1, 1), torch.bfloat16),
    ],
)
def test_other_convolutions_are_torchs_own(inside, outside, side, padding, dtype):
    layer = Conv2d(inside, outside, side, padding=padding).to(dtype)
    x = torch.randn(2, inside, 6, 6)
    assert torch.equal(layer(x), F.conv2d(x.to(dtype), layer.weight, layer.bias, padding=padding))


def test_a_step_below_the_resolution_of_bfloat16_is_seen():
    x = torch.tensor([0.9, 0.8985]).reshape(1, 2, 1, 1)
    assert x.bfloat16()[0, 0] == x.bfloat16()[0, 1]  # rounding alone would not tell them apart
    kernel = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).reshape(1, 2, 1, 1)
    assert convolve_image(x, kernel, None).item() == pytest.approx(0.0015, rel=0.01)


def test_features_come_in_the_order_of_the_weights():
    x, weight = torch.randn(2, 8, 4, 4), torch.randn(6, 8, 3, 3)
    assert taken_by(weight, x) is x
    assert taken_by(torch.zeros(6, 8, 1, 1), x) is x  # both orders at once
    turned = taken_by(weight.contiguous(memory_format=torch.channels_last), x)
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(turned, x)


@pytest.mark.parametrize(
    ("layer", "operator"),
    [
        (Conv2d(8, 6, 3, padding=1), "conv2d"),
        (PooledConv2d(8, 6), "conv2d"),
        (ConvTranspose2d(8, 6, 4, stride=2, padding=1), "conv_transpose2d"),
    ],
)
def test_layers_hand_features_over_in_that_order(layer, operator, monkeypatch):
    seen, plain = [], getattr(F, operator)
    layer = copy.deepcopy(layer)
    layer.weight.data = (layer.kernel() if isinstance(layer, Conv2d) else layer.weight).detach()
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(F, operator, lambda x, *rest: seen.append(x) or plain(x, *rest))
    layer(torch.randn(2, 8, 4, 4))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_features_meet_coarse_weights_in_their_type():
    layer = Conv2d(8, 6, 3, padding=1).bfloat16()
    x = torch.randn(1, 8, 4, 4)
    assert torch.equal(layer(x), F.conv2d(x.bfloat16(), layer.weight, layer.bias, padding=1))
