import shutil

import numpy as np
import pytest
import torch

from dualmcmc.data.store import Memory
from dualmcmc.metrics.features import Features
from dualmcmc.metrics.frechet import Moments, frechet_distance
from dualmcmc.tasks.reference import FeatureSet, reference
from tests.networks import Tiny

WHAT = {"source": "mine", "split": "train", "size": 8, "channels": 3, "crop": "center", "resize": "lanczos"}


class Counting(Tiny):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


@pytest.fixture
def images():
    return Memory(torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8))


def features(checksum="network"):
    net = Counting()
    return Features(net, 48, "cpu", standard=False, checksum=checksum), net


def test_statistics_are_worked_out_once(images, cache):
    take, net = features()
    first, cached = reference(images, WHAT, take)
    assert not cached
    assert net.seen == 60
    direct = Moments.of(take(images.tensor()))
    assert frechet_distance(first.moments, direct) == pytest.approx(0, abs=1e-6)
    again, cached = reference(images, WHAT, take)
    assert cached
    assert net.seen == 120  # the direct look, not another run through
    assert again.moments.count == 60
    assert torch.allclose(again.moments.covariance, direct.covariance, rtol=1e-6, atol=1e-9)
    (path,) = (cache / "statistics").iterdir()
    assert path.name.startswith("mine-8-center-")


@pytest.mark.parametrize("change", ["crop", "size", "source", "pixels", "network"])
def test_anything_else_is_worked_out_again(images, change):
    take, _ = features()
    reference(images, WHAT, take)
    what = dict(WHAT)
    if change in what:
        what[change] = {"crop": "none", "size": 16, "source": "yours"}[change]
    if change == "pixels":
        changed = images.tensor().clone()
        changed[0, 0, 0, 0] ^= 1
        images = Memory(changed)
    if change == "network":
        take, _ = features("another")
    assert not reference(images, what, take)[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "text"])
def test_damage_is_seen_and_worked_out_again(images, cache, damage):
    take, _ = features()
    expected = reference(images, WHAT, take)[0].moments.mean
    (path,) = (cache / "statistics").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-100] ^= 1
    path.write_bytes(b"no statistics" if damage == "text" else bytes(content[:-50] if damage == "cut" else content))
    found, cached = reference(images, WHAT, take)
    assert not cached
    assert torch.equal(found.moments.mean, expected)
    assert reference(images, WHAT, take)[1]  # mended


def test_a_long_name_and_a_cache_that_cannot_be_written_to(images, cache):
    take, _ = features()
    reference(images, WHAT | {"source": "n" * 250}, take)
    assert reference(images, WHAT | {"source": "n" * 250}, take)[1]
    shutil.rmtree(cache / "statistics")
    (cache / "statistics").write_text("in the way")
    assert reference(images, WHAT, take)[0].moments.count == 60


def test_all_features_are_kept_only_where_they_are_wanted(images):
    take, _ = features()
    found, cached = reference(images, WHAT, take, keep=True)
    assert not cached
    assert np.allclose(found.rows(), take(images.tensor()))
    assert not reference(images, WHAT, take, keep=True)[1]  # features are not in the cache
    assert reference(images, WHAT, take)[1]


def test_rows_are_in_their_order_whoever_found_them():
    """As several processes have them: the parts of one, then those of the other."""
    found = FeatureSet(Features(Tiny(), 48, "cpu", standard=False, checksum="tiny"), keep=True)
    for first in (0, 4, 2):
        found.add(torch.full((2, 48), float(first)), first)
    assert found.rows()[:, 0].tolist() == [0, 0, 2, 2, 4, 4]
