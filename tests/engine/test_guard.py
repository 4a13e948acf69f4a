import math

import pytest

from dualmcmc.config import Guard
from dualmcmc.engine.guard import check, gentler
from dualmcmc.errors import Diverged
from dualmcmc.settings import apply_overrides, load_config, to_tree

HEALTHY = {"energy_gap_max": 1.0, "x_moved": 0.1, "z_moved": 0.3, "loss": -3.0}


def test_healthy_numbers_pass():
    check(HEALTHY, Guard(energy_gap=2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_stop(bad):
    with pytest.raises(Diverged, match="grad_norm_energy is"):
        check({"grad_norm_energy": bad, "energy_gap_max": 0.0}, Guard())


@pytest.mark.parametrize(
    ("name", "bound"), [("energy_gap_max", "energy_gap"), ("x_moved", "x_moved"), ("z_moved", "z_moved")]
)
def test_what_is_past_its_bound_stops(name, bound):
    with pytest.raises(Diverged, match=rf"guard\.{bound}=2\. "):
        check(HEALTHY | {name: 2.1}, Guard(**{bound: 2}))


def test_gentler_settings_lower_learning_rates_and_steps_alone():
    config = load_config("digits", ["guard.lower=0.25"])
    new, lowered = gentler(config)
    assert lowered == {
        "optim.energy.lr": 2.5e-4,
        "optim.generator.lr": 5e-4,
        "optim.inference.lr": 2.5e-4,
        "teaching.x_chain.step_size": 0.125,
        "teaching.z_chain.step_size": 2e-4,
    }
    before, after = to_tree(config), to_tree(new)
    assert after != before
    assert apply_overrides(before, [f"{key}={value}" for key, value in lowered.items()]) == after
