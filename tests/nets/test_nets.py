"""Shapes, seeds, and the parameter counts of the paper's table of computational cost."""

import pytest
import torch

from dualmcmc import config_io
from dualmcmc.nets import Gaussian, build, parameter_counts


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("cifar10-simple-authors", {"energy": 2, "generator": 8, "inference": 5}),
        ("cifar10-resnet", {"energy": 16, "generator": 16, "inference": 15}),
    ],
)
def test_parameter_counts(preset, millions):
    with torch.device("meta"):  # shapes without memory
        counts = parameter_counts(build(config_io.load_config(preset, ["nets.spectral_norm=false"])))
    for name, expected in millions.items():
        assert counts[name] / 1e6 == pytest.approx(expected, rel=0.075), name  # the paper rounds to millions


def test_style_generator_parameters():
    with torch.device("meta"):
        counts = parameter_counts(build(config_io.load_config("cifar10-simple", ["nets.kind=style"])))
    assert counts["generator"] / 1e6 == pytest.approx(14, rel=0.05)


def test_depth_adds_convolutions_per_resolution():
    for depth in (1, 2, 3):
        energy = build(config_io.load_config("digits", ["data.size=16", f"nets.energy_depth={depth}"])).energy
        sides = [m.kernel_size[0] for m in energy.modules() if isinstance(m, torch.nn.Conv2d)]
        assert sides == [3] + 2 * ([4] + [3] * (depth - 1))


@pytest.mark.parametrize("kind", ["simple", "resnet", "style"])
@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 3), (32, 3), (64, 3), (256, 1)])
def test_shapes(kind, size, channels):
    tree = {
        "data": {"size": size, "channels": channels},
        "nets": {"kind": kind, "energy_width": 4, "generator_width": 4, "inference_width": 2},
        "teaching": {"latent_dim": 6},
    }
    trio = build(config_io.from_tree(tree))
    with torch.no_grad():
        x = trio.generator(torch.randn(2, 6))
        assert x.shape == (2, channels, size, size)
        assert x.abs().max() <= 1
        assert trio.energy(x).shape == (2,)
        q = trio.inference(x)
    assert isinstance(q, Gaussian)
    assert q.mean.shape == q.log_var.shape == (2, 6)


def test_seed_fixes_the_weights_without_touching_global_generators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPU's generators were seeded"))
    config = config_io.load_config("digits")
    torch.default_generator.manual_seed(1)
    expected = torch.rand(3)
    torch.default_generator.manual_seed(1)
    first, second = build(config), build(config)
    assert torch.equal(torch.rand(3), expected)
    other = build(config_io.load_config("digits", ["seed=1"]))
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_spectral_norm_of_every_energy_layer():
    layers = (torch.nn.Conv2d, torch.nn.Linear)
    for wanted in (True, False):
        energy = build(config_io.load_config("digits", [f"nets.spectral_norm={wanted}"])).energy
        normed = [hasattr(m, "parametrizations") for m in energy.modules() if isinstance(m, layers)]
        assert len(normed) > 3
        assert all(flag == wanted for flag in normed)


def test_batchnorm_gain():
    for gain in ("normal", "ones"):
        generator = build(
            config_io.load_config("digits", ["nets.kind=resnet", f"nets.batchnorm_gain={gain}"])
        ).generator
        assert bool((generator.norm.weight == 1).all()) == (gain == "ones")
