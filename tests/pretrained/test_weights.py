"""The pretrained weights still produce the samples they were released with.

CIFAR-10 and Inception are not available everywhere, so samples are compared by simpler features than FID's
(`block_statistics.py`).
"""

import hashlib

import pytest
import torch
import yaml

import dualmcmc
from dualmcmc.metrics.fid import Moments, frechet_distance
from dualmcmc.pretrained import PRETRAINED, checkout_file
from dualmcmc.utils.images import to_uint8
from tests.pretrained.block_statistics import block_features, block_statistics

pytestmark = pytest.mark.skipif(
    checkout_file("cifar10-simple") is None, reason="the weights are in the repository only"
)
SAMPLES, STEPS = 32, 3
# Measured on 2 cores with torch 2.13.0. From 32 samples a distance says little about a model (300 give 0.423), but the
# same noise through the same weights must give the same value.
EXPECTED = {
    "distance_generator": 3.348733,
    "energy_generator": 0.1360526,
    "distance_ebm": 3.348372,
    "energy_ebm": 0.08207335,
    "reconstruction_mse": 0.07223468,
}
# Relative. One or two threads, with or without oneDNN, differ by up to 5e-6; weights that are 1 % off change the
# distance by 1e-3 (generator), the energy by 1e-2 (energy) or the reconstruction error by 5e-3 (inference).
TOLERANCE = 3e-4


def measure(run):
    def distance(images):
        return frechet_distance(Moments.of(block_features(to_uint8(images))), block_statistics())

    samples = run.sample(SAMPLES, steps=0, rng=torch.Generator().manual_seed(0))
    revised = run.revise_x(samples, steps=STEPS, rng=torch.Generator().manual_seed(1))
    few = samples[:8]
    return {
        "distance_generator": distance(samples),
        "energy_generator": run.energy(samples).mean().item(),
        "distance_ebm": distance(revised),
        "energy_ebm": run.energy(revised).mean().item(),
        "reconstruction_mse": (run.reconstruct(few, steps=0) - few).square().mean().item(),
    }


@pytest.fixture(scope="module")
def run():
    torch.set_num_threads(1)
    return dualmcmc.load("cifar10-simple", device="cpu")


def test_samples_are_those_of_the_release(run):
    assert measure(run) == pytest.approx(EXPECTED, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("network", "affected"),
    [("generator", "distance_generator"), ("energy", "energy_generator"), ("inference", "reconstruction_mse")],
)
def test_slightly_wrong_weights_are_detected(run, network, affected):
    rng = torch.Generator().manual_seed(5)
    parameters = list(run.trio.get_submodule(network).parameters())
    before = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.add_(0.01 * parameter.square().mean().sqrt() * torch.randn(parameter.shape, generator=rng))
    changed = measure(run)[affected]
    for parameter, value in zip(parameters, before, strict=True):
        parameter.copy_(value)
    assert changed != pytest.approx(EXPECTED[affected], rel=TOLERANCE)


@pytest.mark.parametrize(("name", "entry"), PRETRAINED.items())
def test_model_card(name, entry):
    file = checkout_file(name)
    content, card = file.read_bytes(), file.with_suffix(".md").read_text()
    assert (hashlib.sha256(content).hexdigest(), len(content)) == (entry.sha256, entry.size)
    assert entry.sha256 in card
    assert f"dualmcmc sample {name}" in card
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "dualmcmc"  # it is also the card on the Hub
    assert entry.size < 35e6


def test_every_file_is_pinned():
    folder = checkout_file("cifar10-simple").parent
    assert {path.stem for path in folder.glob("*.safetensors")} == PRETRAINED.keys()
