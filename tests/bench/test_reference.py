"""The package against the eager reference, which shares no code with it."""

import pytest
import torch

from dualmcmc import config_io, rng
from dualmcmc.bench.reference import Reference
from dualmcmc.bench.step import build_reference, build_state
from dualmcmc.methods import step
from dualmcmc.nets import build

CPU = torch.device("cpu")
SMALL = [f"nets.{name}_width=4" for name in ("energy", "generator", "inference")]
SHORT = ["teaching.x_chain.steps=3", "teaching.z_chain.steps=2", "teaching.z_chain.step_size=1e-4", "train.batch=5"]
PRESETS = ["digits", "cifar10-simple", "cifar10-resnet", "celeba64", "mnist"]


def small_config(preset: str, *overrides: str):
    return config_io.load_config(preset, [*SMALL, *SHORT, *overrides])


def random_images(config):
    return torch.rand(5, config.data.channels, config.data.size, config.data.size) * 2 - 1


@pytest.mark.parametrize("preset", PRESETS)
def test_same_networks(preset):
    assert_same_networks(small_config(preset))


@pytest.mark.parametrize("preset", ["digits", "cifar10-simple"])
def test_same_style_networks(preset):
    assert_same_networks(small_config(preset, "nets.kind=style"))


def assert_same_networks(config):
    trio, reference = build(config).train(), Reference(config, CPU)
    reference.nets.load_state_dict(trio.state_dict())
    x, z = random_images(config), torch.randn(5, config.teaching.latent_dim)
    assert torch.allclose(trio.energy(x), reference.energy(x), atol=1e-5)
    assert torch.allclose(trio.generator(z), reference.generator(z), atol=1e-5)
    for ours, expected in zip(trio.inference(x), reference.inference(x), strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        *((preset, []) for preset in PRESETS),
        ("digits", ["teaching.second_x_chain=true", "teaching.start_noise=0.1", "teaching.energy_l2=0.5"]),
        ("digits", ["teaching.energy_consistency=2"]),
        ("digits", ["teaching.energy_augment=0.7", "teaching.second_x_chain=true"]),
        ("cifar10-simple", ["teaching.energy_augment=0.5"]),
        ("digits", ["nets.energy_slope=0.5"]),
        ("digits", ["nets.kind=style"]),
        ("cifar10-resnet", ["nets.energy_slope=0.5"]),
        ("cifar10-resnet", ["teaching.energy_consistency=2", "teaching.second_x_chain=true"]),
    ],
)
def test_same_iterations(preset, overrides):
    config = small_config(preset, *overrides)
    reference, noise = build_reference(config, CPU)
    state = build_state(config, CPU)
    x = random_images(config)
    for iteration in range(2):
        expected = reference.iteration(x, noise)
        ours = step(state.trio, state.optimizers, x, state.rng, config.teaching)
        assert ours.keys() == expected.keys()
        tolerance = 1e-3 if iteration == 0 else 0.05  # Adam divides rounding errors by values close to 0
        for name, value in expected.items():
            assert torch.allclose(ours[name], value, rtol=tolerance, atol=tolerance * 1e-2), (iteration, name)
    assert torch.equal(noise.get_state(), state.rng.get_state())  # the same noise was drawn
    assert not torch.equal(noise.get_state(), rng.make_generator(0).get_state())


def test_gradient_clipping_is_refused():
    config = small_config("digits", "teaching.x_chain.grad_clip=1")
    reference, noise = build_reference(config, CPU)
    with pytest.raises(ValueError, match="neither grad_clip nor metropolis"):
        reference.iteration(torch.zeros(5, 1, 8, 8), noise)
