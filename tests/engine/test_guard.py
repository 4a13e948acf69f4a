import math

import pytest

from dualmcmc.config import Guard
from dualmcmc.config_io import apply_overrides, load_config, to_tree
from dualmcmc.engine.guard import advice, back_off, check
from dualmcmc.utils.errors import Diverged

HEALTHY = {"energy_gap_max": 1.0, "x_displacement_rms": 0.1, "z_displacement_rms": 0.3, "loss": -3.0}


def test_healthy_statistics_pass():
    check(HEALTHY, Guard(max_energy_gap=2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_statistics(bad):
    with pytest.raises(Diverged, match="grad_norm_energy is"):
        check({"grad_norm_energy": bad, "energy_gap_max": 0.0}, Guard())


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("energy_gap_max", "max_energy_gap"),
        ("x_displacement_rms", "max_x_displacement"),
        ("z_displacement_rms", "max_z_displacement"),
    ],
)
def test_limits(name, limit):
    with pytest.raises(Diverged, match=rf"is 2\.1, above guard\.{limit}=2\. "):
        check(HEALTHY | {name: 2.1}, Guard(**{limit: 2}))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("energy_gap", "x_displacement_rms", "z_displacement_rms"),
            "Try a smaller optim.energy.lr, teaching.x_chain.step_size or teaching.z_chain.step_size, "
            "teaching.x_chain.clamp=1 or a grad_clip",
        ),
        (("energy_gap",), "Try a smaller optim.energy.lr"),
        (("z_displacement_rms",), "Try a smaller optim.generator.lr or teaching.z_chain.step_size"),
        (("reconstruction_mse",), "Try a smaller optim.generator.lr"),
    ],
)
def test_advice_is_for_what_the_method_has(names, expected):
    assert advice(names) == expected


def test_back_off_reduces_learning_rates_and_step_sizes():
    config = load_config("digits", ["guard.backoff=0.25"])
    new, reduced = back_off(config)
    assert reduced == {
        "optim.energy.lr": 2.5e-4,
        "optim.generator.lr": 5e-4,
        "optim.inference.lr": 2.5e-4,
        "teaching.x_chain.step_size": 0.125,
        "teaching.z_chain.step_size": 2e-4,
    }
    before, after = to_tree(config), to_tree(new)
    assert after != before
    assert apply_overrides(before, [f"{key}={value}" for key, value in reduced.items()]) == after
