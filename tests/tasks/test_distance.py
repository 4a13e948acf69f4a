import numpy as np
import pytest
from PIL import Image

from dualmcmc.errors import UserError
from dualmcmc.metrics.features import Features
from dualmcmc.tasks.distance import distance
from tests.data import makers
from tests.data.makers import pixels
from tests.networks import Tiny


def take():
    return Features(Tiny(), 48, "cpu", standard=False, checksum="tiny")


def test_splits_of_a_set(cache):
    makers.mnist(cache / "mnist", pixels(60, 28, 1), pixels(70, 28, 1, seed=1))
    name, value, sets = distance("mnist:train", "mnist:test", take())
    assert name == "frechet_own_network"
    assert value > 0
    assert [(one["split"], one["images"], one["size"], one["channels"]) for one in sets] == [
        ("train", 60, 28, 1),
        ("test", 70, 28, 1),
    ]
    assert distance("mnist", "mnist:train", take())[1] == pytest.approx(0, abs=1e-6)


def test_a_folder_against_a_set(cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(60, 28, 1), pixels(3, 28, 1))
    for number, image in enumerate(pixels(60, 28, 1)):
        Image.fromarray(np.repeat(image, 3, 2)).save(tmp_path / f"{number:02}.png")
    _, value, sets = distance(str(tmp_path), "mnist", take())
    assert value == pytest.approx(0, abs=1e-6)  # the same images, in colour
    assert sets[1]["channels"] == 3
    assert any("converted to 28x28 RGB from 28x28 grey" in note for note in sets[1]["notes"])
    assert any("much too high" in note for note in sets[0]["notes"])  # of 60 images


def test_bad_requests(cache, tmp_path):
    makers.mnist(cache / "mnist", pixels(6, 28, 1), pixels(1, 28, 1))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    for first, second, words in [
        ("mnist:", "mnist", "names no split"),
        ("mnist:extra", "mnist", "no split 'extra'"),
        ("mnits", "mnist", "Did you mean 'mnist'"),
        ("mnist", "digits", "--size is needed"),
        ("mnist", "mnist:test", "two or more"),
    ]:
        with pytest.raises(UserError, match=words):
            distance(first, second, take())
    with pytest.raises(UserError, match="--size is needed"):
        distance(str(tmp_path), str(tmp_path), take())
