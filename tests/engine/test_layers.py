import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dualmcmc.engine.layers import FastConv2d, FastConvTranspose2d, _match_layout, convolve_image


@pytest.mark.parametrize(("channels", "side"), [(1, 3), (3, 3), (3, 1)])
def test_bfloat16_convolution_of_an_image(channels, side):
    x = (torch.rand(2, channels, 8, 8) * 2 - 1).requires_grad_()
    layer = FastConv2d(channels, 16, side, padding=side // 2).bfloat16()
    nn.init.normal_(layer.bias)
    expected = F.conv2d(x, layer.weight.float(), layer.bias.float(), padding=side // 2)
    output = layer(x)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.float(), expected, rtol=2**-7, atol=2**-8)
    cotangent = torch.randn_like(expected).bfloat16()
    ours = torch.autograd.grad(output, (x, layer.weight, layer.bias), cotangent)
    exact = torch.autograd.grad(expected, (x, layer.weight, layer.bias), cotangent.float())
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0.03, atol=0.03 * b.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "side", "bias"), [(1, 3, True), (3, 1, False), (4, 5, False)])
def test_bfloat16_convolution_to_an_image(channels, side, bias, dtype):
    features = torch.randn(2, 16, 6, 8).bfloat16().to(dtype).requires_grad_()
    layer = FastConv2d(16, channels, side, padding=side // 2, bias=bias).bfloat16()
    leaves = features, *layer.parameters()
    offset = layer.bias.float() if bias else None
    expected = F.conv2d(features.float(), layer.weight.float(), offset, padding=side // 2)
    output = layer(features)
    assert output.dtype == torch.float32
    assert torch.allclose(output, expected, rtol=2**-7, atol=2**-7)
    cotangent = torch.randn_like(expected)
    ours, exact = (torch.autograd.grad(y, leaves, cotangent) for y in (output, expected))
    for a, b in zip(ours, exact, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0.03, atol=0.01 * b.float().abs().max())


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "side", "padding", "dtype"),
    [
        (8, 3, 3, 1, torch.float32),
        (3, 8, 3, 1, torch.float32),
        (8, 5, 3, 1, torch.bfloat16),  # not an image
        (8, 3, 3, 0, torch.bfloat16),  # changes the size
        (8, 3, 2, 1, torch.bfloat16),
        (8, 3, (3, 5), (1, 1), torch.bfloat16),
    ],
)
def test_other_convolutions_are_torchs(in_channels, out_channels, side, padding, dtype):
    layer = FastConv2d(in_channels, out_channels, side, padding=padding).to(dtype)
    x = torch.randn(2, in_channels, 6, 6)
    assert torch.equal(layer(x), F.conv2d(x.to(dtype), layer.weight, layer.bias, padding=padding))


def test_bfloat16_convolution_resolves_small_differences():
    """One Langevin step moves a pixel by less than bfloat16 resolves."""
    x = torch.tensor([0.9, 0.8985]).reshape(1, 2, 1, 1)
    assert x.bfloat16()[0, 0] == x.bfloat16()[0, 1]
    kernel = torch.tensor([1.0, -1.0], dtype=torch.bfloat16).reshape(1, 2, 1, 1)
    assert convolve_image(x, kernel, None).item() == pytest.approx(0.0015, rel=0.01)


def test_input_takes_the_layout_of_the_weights():
    x, weight = torch.randn(2, 8, 4, 4), torch.randn(6, 8, 3, 3)
    assert _match_layout(weight, x) is x
    assert _match_layout(torch.zeros(6, 8, 1, 1), x) is x  # in both layouts at once
    converted = _match_layout(weight.contiguous(memory_format=torch.channels_last), x)
    assert converted.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(converted, x)


@pytest.mark.parametrize(
    ("layer", "operator"),
    [
        (FastConv2d(8, 6, 3, padding=1), "conv2d"),
        (FastConvTranspose2d(8, 6, 4, stride=2, padding=1), "conv_transpose2d"),
    ],
)
def test_layers_convolve_in_channels_last(layer, operator, monkeypatch):
    seen, original = [], getattr(F, operator)
    layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(F, operator, lambda x, *rest: seen.append(x) or original(x, *rest))
    layer(torch.randn(2, 8, 4, 4))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
