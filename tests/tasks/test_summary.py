import pytest
import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.tasks.summary import summarise


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_summary(run):
    numbers = summarise(run, data.load(run.config.data))
    assert numbers["samples"] == 1438
    assert numbers["measured_on"] == "359 held-out images"
    assert numbers["fd_pixels_real"] == pytest.approx(0.1, abs=0.03)
    assert numbers["fd_pixels_generator"] > numbers["fd_pixels_real"]  # barely trained
    assert torch.isfinite(torch.tensor([v for v in numbers.values() if isinstance(v, float)])).all()
