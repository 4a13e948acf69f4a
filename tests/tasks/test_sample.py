import numpy as np
import pytest
from PIL import Image

import dualmcmc
from dualmcmc.errors import UserError
from dualmcmc.tasks.sample import sample


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_samples_as_pixels_and_as_a_picture(run, tmp_path):
    numbers = sample(run, 9, None, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["generator"].shape == stored["revised"].shape == (9, 8, 8, 1)
        assert stored["revised"].dtype == np.uint8
    assert numbers["steps"] == 3
    sample(run, 9, 20, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[0] > 2 * 3 * 64
    for bad in ("a.jpg", "absent/a.png"):
        with pytest.raises(UserError, match="--out"):
            sample(run, 9, None, tmp_path / bad)
    with pytest.raises(UserError, match="-n"):
        sample(run, 0, None, tmp_path / "a.png")


def test_the_x_chain_lowers_the_energy(run, tmp_path):
    numbers = sample(run, 64, 30, tmp_path / "a.npz")
    assert numbers["energy_revised"] < numbers["energy_generator"]
    assert numbers["x_moved"] > 0
