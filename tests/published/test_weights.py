"""The weights that come with the package still give what they gave when they were published.

CIFAR-10 and Inception are not everywhere, so samples are compared by simpler features than FID's (`reference.py`).
"""

import hashlib

import pytest
import torch

import dualmcmc
from dualmcmc import published
from dualmcmc.metrics.frechet import Moments, frechet_distance
from dualmcmc.pictures import to_uint8
from tests.published.reference import features, reference

NAME = "cifar10-simple"
SAMPLES = 300
STEPS = 5  # of the x-chain: enough to see that it goes down, and as much as a CPU does in seconds
# What the two kinds of samples gave on two cores, torch 2.13.0. Other seeds give distances of 0.39 to 0.48: few samples
# tell little about a model, but the same noise through the same weights tells whether the code still is what it was.
DISTANCE = {"generator": 0.44730, "ebm": 0.44721}
ENERGY = {"generator": 0.09127, "ebm": 0.07153}
TOLERANCE = 0.001  # relative; one core or two, with or without oneDNN, they agree to 2e-6


def distance(images):
    return frechet_distance(Moments.of(features(to_uint8(images))), reference())


@pytest.fixture
def run():
    return dualmcmc.load(NAME, device="cpu")


def generated(run):
    return run.sample(SAMPLES, steps=0, rng=torch.Generator().manual_seed(0))


def test_samples_are_those_published(run):
    samples = generated(run)
    revised = run.revise_x(samples, steps=STEPS, rng=torch.Generator().manual_seed(1))
    for kind, images in (("generator", samples), ("ebm", revised)):
        assert distance(images) == pytest.approx(DISTANCE[kind], rel=TOLERANCE), kind
        assert run.energy(images).mean().item() == pytest.approx(ENERGY[kind], rel=TOLERANCE), kind


def test_weights_a_little_off_are_noticed(run):
    rng = torch.Generator().manual_seed(5)
    for parameter in run.trio.generator.parameters():
        parameter.add_(0.05 * parameter.square().mean().sqrt() * torch.randn(parameter.shape, generator=rng))
    samples = generated(run)
    assert distance(samples) != pytest.approx(DISTANCE["generator"], rel=TOLERANCE)
    assert run.energy(samples).mean().item() != pytest.approx(ENERGY["generator"], rel=TOLERANCE)


@pytest.mark.parametrize(("name", "file"), published.published().items())
def test_weights_are_described(name, file):
    card = file.with_suffix(".md").read_text()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in card
    assert f"dualmcmc sample {name}" in card
    assert file.stat().st_size < 35e6
