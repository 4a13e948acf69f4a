import math

import pytest
import torch

from dualmcmc.engine.window import Window


def test_means_and_the_largest_gap_of_the_newest():
    window = Window(3)
    for gap, loss in ((1.0, 2.0), (-5.0, 4.0)):
        window.add({"energy_gap": torch.tensor(gap), "loss": torch.tensor(loss)})
    assert window.read(2) == {"energy_gap": -2.0, "loss": 3.0, "energy_gap_max": 5.0}
    window.add({"energy_gap": torch.tensor(0.5), "loss": torch.tensor(1.0)})
    assert window.read(1) == {"energy_gap": 0.5, "loss": 1.0, "energy_gap_max": 0.5}
    for gap in (1.0, 2.0, 3.0):  # the first ones have left
        window.add({"energy_gap": torch.tensor(gap), "loss": torch.tensor(gap)})
    assert window.read(3) == {"energy_gap": 2.0, "loss": 2.0, "energy_gap_max": 3.0}


@pytest.mark.parametrize("position", range(3))
def test_one_bad_iteration_shows(position):
    window = Window(3)
    for index in range(3):
        window.add({"energy_gap": torch.tensor(math.nan if index == position else 0.0)})
    record = window.read(3)
    assert math.isnan(record["energy_gap"])
    assert math.isnan(record["energy_gap_max"])


def test_it_keeps_no_tensor_of_the_caller():
    window, value = Window(), torch.tensor(1.0)
    window.add({"energy_gap": value})
    window.add({"energy_gap": torch.tensor(1.0)})
    assert value == 1.0
