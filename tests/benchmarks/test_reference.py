"""The reference shares no code with the package: where they agree, both are right or both are wrong alike."""

import pytest
import torch

from dualmcmc import rng, settings
from dualmcmc.bench.check import build_reference, reference_module
from dualmcmc.engine.state import TrainState
from dualmcmc.methods.dual_mcmc import step
from dualmcmc.nets import build

CPU = torch.device("cpu")
SMALL = [f"nets.{name}_width=4" for name in ("energy", "generator", "inference")]
SHORT = ["teaching.x_chain.steps=3", "teaching.z_chain.steps=2", "teaching.z_chain.step_size=1e-4", "train.batch=5"]
PRESETS = ["digits", "cifar10-simple", "cifar10-resnet", "celeba64", "mnist"]


def config_of(preset: str, *changes: str):
    return settings.load_config(preset, [*SMALL, *SHORT, *changes])


@pytest.mark.parametrize("preset", PRESETS)
def test_networks_are_the_same_functions(preset):
    config = config_of(preset)
    ours, theirs = build(config).train(), reference_module().Reference(config, CPU)
    theirs.nets.load_state_dict(ours.state_dict())
    x = torch.rand(5, config.data.channels, config.data.size, config.data.size) * 2 - 1
    z = torch.randn(5, config.teaching.latent_dim)
    assert torch.allclose(ours.energy(x), theirs.energy(x), atol=1e-5)
    assert torch.allclose(ours.generator(z), theirs.generator(z), atol=1e-5)
    for mine, other in zip(ours.inference(x), theirs.inference(x), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["teaching.second_x_chain=true", "teaching.start_noise=0.1", "teaching.energy_l2=0.5"],
        ["teaching.energy_consistency=2"],
        ["teaching.energy_consistency=2", "teaching.second_x_chain=true"],
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_iterations_give_the_same_numbers(preset, changes):
    config = config_of(preset, *changes)
    reference, noise = build_reference(config, CPU)
    ours = TrainState(config, CPU)
    x = torch.rand(5, config.data.channels, config.data.size, config.data.size) * 2 - 1
    for number in range(2):
        theirs = reference.iteration(x, noise)
        mine = step(ours.trio, ours.optimizers, x, ours.rng, config.teaching)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            rough = 1e-3 if number == 0 else 0.05  # an update multiplies rounding: Adam divides by what is nearly 0
            assert torch.allclose(mine[name], value, rtol=rough, atol=rough * 1e-2), (number, name)


def test_both_draw_the_same_noise():
    config = config_of("digits")
    reference, noise = build_reference(config, CPU)
    ours = TrainState(config, CPU)
    x = torch.rand(5, 1, 8, 8)
    reference.iteration(x, noise)
    step(ours.trio, ours.optimizers, x, ours.rng, config.teaching)
    assert torch.equal(noise.get_state(), ours.rng.get_state())
    assert not torch.equal(noise.get_state(), rng.generator(0).get_state())


def test_what_it_does_not_have_it_refuses():
    config = config_of("digits", "teaching.x_chain.grad_clip=1")
    reference, noise = build_reference(config, CPU)
    with pytest.raises(ValueError, match="no grad_clip"):
        reference.iteration(torch.zeros(5, 1, 8, 8), noise)
