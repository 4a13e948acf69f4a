"""Shapes at every size, and the paper's parameter counts (its table of computational cost)."""

import pytest
import torch
import torch.nn.functional as F

from dualmcmc import settings
from dualmcmc.errors import UserError
from dualmcmc.nets import Gaussian, build, parameter_counts
from dualmcmc.nets.blocks import DownBlock, UpBlock, Upsample, resnet_widths, stages


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("cifar10-simple", {"energy": 2, "generator": 8, "inference": 5}),
        ("cifar10-resnet", {"energy": 16, "generator": 16, "inference": 15}),
    ],
)
def test_parameter_counts_are_the_papers(preset, millions):
    counts = parameter_counts(build(settings.load(preset)))
    for name, expected in millions.items():
        assert counts[name] / 1e6 == pytest.approx(expected, rel=0.06), name


@pytest.mark.parametrize("kind", ["simple", "resnet"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 28, 32, 64, 256])
def test_shapes(kind, size, channels):
    tree = {
        "data": {"size": size, "channels": channels},
        "nets": {"kind": kind, "energy_width": 4, "generator_width": 4, "inference_width": 2},
        "teaching": {"latent_dim": 6},
    }
    trio = build(settings.from_tree(tree))
    with torch.no_grad():
        x = trio.generator(torch.randn(2, 6))
        assert x.shape == (2, channels, size, size)
        assert x.abs().max() <= 1
        assert trio.energy(x).shape == (2,)
        q = trio.inference(x)
    assert isinstance(q, Gaussian)
    assert q.mean.shape == q.log_var.shape == (2, 6)


def test_weights_follow_the_seed_and_leave_the_global_streams_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPU's stream was seeded"))
    config = settings.load("digits")
    torch.default_generator.manual_seed(1)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(1)
    first, second = build(config), build(config)
    assert torch.equal(torch.rand(3), expected)
    other = build(settings.load("digits", ["seed=1"]))
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_spectral_norm_covers_every_layer_of_the_energy():
    layers = (torch.nn.Conv2d, torch.nn.Linear)
    for wanted in (True, False):
        energy = build(settings.load("cifar10-simple", [f"nets.spectral_norm={wanted}"])).energy
        normed = [hasattr(m, "parametrizations") for m in energy.modules() if isinstance(m, layers)]
        assert len(normed) > 3
        assert all(flag == wanted for flag in normed)


def test_batchnorm_gain():
    for gain in ("normal", "ones"):
        generator = build(settings.load("cifar10-resnet-128", [f"nets.batchnorm_gain={gain}"])).generator
        assert bool((generator.norm.weight == 1).all()) == (gain == "ones")


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


def test_gaussian_is_the_distribution():
    q = Gaussian(torch.randn(4, 3), torch.randn(4, 3))
    z = torch.randn(4, 3)
    reference = torch.distributions.Normal(q.mean, (0.5 * q.log_var).exp()).log_prob(z).sum(1)
    constant = 1.5 * torch.log(torch.tensor(2 * torch.pi))
    assert torch.allclose(q.nll(z) + constant, -reference, atol=1e-5)
    wide = Gaussian(torch.full((100_000, 1), 2.0), torch.full((100_000, 1), 1.0))
    draws = wide.sample(torch.Generator().manual_seed(0))
    assert draws.mean().item() == pytest.approx(2, abs=0.03)
    assert draws.var().item() == pytest.approx(2.71828, rel=0.03)
