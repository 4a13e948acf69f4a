import math

import pytest

from dualmcmc.config import Guard
from dualmcmc.engine.guard import check
from dualmcmc.errors import Diverged


def test_healthy_numbers_pass():
    check({"energy_gap_max": 1.0, "loss": -3.0}, Guard(energy_gap=2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_stop(bad):
    with pytest.raises(Diverged, match="grad_norm_energy is"):
        check({"grad_norm_energy": bad, "energy_gap_max": 0.0}, Guard())


def test_a_wide_gap_stops():
    with pytest.raises(Diverged, match=r"guard\.energy_gap=2"):
        check({"energy_gap_max": 2.1}, Guard(energy_gap=2))
