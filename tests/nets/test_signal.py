import pytest
import torch
from torch import nn

from dualmcmc import config_io
from dualmcmc.nets import build
from dualmcmc.nets.blocks import Activation, Gain
from dualmcmc.nets.signal import mean_slope, normalize_signal

CASES = [
    ("simple", 16, 1), ("simple", 16, 2), ("simple", 16, 4), ("simple", 32, 2), ("resnet", 32, 1), ("resnet", 64, 1),
]  # fmt: skip


def make_energy(kind, size=16, depth=1, slope=0.3, width=8):
    tree = {
        "data": {"size": size, "channels": 3},
        "nets": {"kind": kind, "energy_width": width, "generator_width": 1, "inference_width": 1},
    }
    tree["nets"] |= {"energy_depth": depth, "energy_slope": slope}
    return build(config_io.from_tree(tree)).energy


def make_images(size=16, count=20):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(3)) * 2 - 1


@pytest.mark.parametrize(("kind", "size", "depth"), CASES)
def test_the_slope_is_the_requested_one(kind, size, depth):
    energy, x = make_energy(kind, size, depth), make_images(size)
    normalize_signal(energy, x, 0.3)
    assert mean_slope(energy.eval(), x) == pytest.approx(0.3, rel=1e-4)


@pytest.mark.parametrize(("kind", "size", "depth"), CASES)
def test_every_activation_has_unit_rms(kind, size, depth):
    energy, x, rms = make_energy(kind, size, depth), make_images(size), []
    normalize_signal(energy, x, 0.3)
    activations = [module for module in energy.modules() if isinstance(module, Activation)]
    for module in activations:
        module.register_forward_hook(lambda module, inputs, output: rms.append(output.square().mean().sqrt().item()))
    energy.eval()(x)
    assert len(rms) == len(activations) > 3
    assert rms == pytest.approx([1] * len(rms), rel=1e-4)


def test_without_gains_the_slope_fades_with_depth():
    slopes = [mean_slope(make_energy("simple", 16, depth, None).eval(), make_images()) for depth in (1, 4)]
    assert slopes[1] < slopes[0] / 50


@pytest.mark.parametrize("kind", ["simple", "resnet"])
def test_gains_are_buffers_saved_with_the_weights(kind):
    energy, x = make_energy(kind), make_images()
    mode = energy.training
    normalize_signal(energy, x, 0.3)
    assert energy.training == mode
    other = make_energy(kind)
    other.load_state_dict(energy.state_dict())
    assert torch.equal(other.eval()(x), energy.eval()(x))
    gains = {name for name in energy.state_dict() if name.endswith("value")}
    assert gains.isdisjoint(name for name, _ in energy.named_parameters())
    assert make_energy(kind, slope=None).state_dict().keys() == energy.state_dict().keys() - gains


def test_own_networks_can_have_gains():
    net = nn.Sequential(nn.Linear(4, 9), Activation(gain=True), nn.Linear(9, 1), nn.Flatten(0), Gain(True))
    x = torch.randn(30, 4)
    normalize_signal(net, x, 2.0)
    assert mean_slope(net, x) == pytest.approx(2.0, rel=1e-4)
    with pytest.raises(ValueError, match="no gains"):
        normalize_signal(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), x, 2.0)


def test_images_of_zeros_give_finite_gains():
    energy = make_energy("resnet")
    normalize_signal(energy, torch.zeros(4, 3, 16, 16), 0.3)
    assert all(value.isfinite().all() for value in energy.state_dict().values())
