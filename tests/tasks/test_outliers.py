import numpy as np
import pytest
import torch

from dualmcmc import data
from dualmcmc.data.store import MemoryStore, SubsetStore
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.outliers import SCORES, Detection, outliers, picture
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8


@pytest.fixture
def own(learned):
    return images_for(learned).store


def test_dataset_against_itself_is_at_chance(learned, own):
    halves = np.random.default_rng(0).permutation(len(own))
    half, other = SubsetStore(own, halves[:180]), SubsetStore(own, halves[180:])
    for name, numbers in outliers(learned, half, {"other": other}, list(SCORES)).numbers["other"].items():
        assert numbers["auroc"] == pytest.approx(0.5, abs=0.1), name  # the standard error is 0.03
    assert outliers(learned, own, {"same": own}, ["energy"]).numbers["same"]["energy"]["auroc"] == 0.5


def test_noise_is_detected(learned, own):
    noise = MemoryStore(torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8))
    result = outliers(learned, own, {"noise": noise}, list(SCORES))
    assert result.numbers["noise"]["reconstruction"]["auroc"] > 0.95
    assert picture(result).shape[0] == 3
    counts = {name: len(values) for name, values in result.scores["energy"].items()}
    assert counts == {
        "in_distribution": 359,
        "noise": 100,
    }


def test_legend_says_how_well_each_dataset_is_detected(learned, own, monkeypatch):
    legends = {}

    def histograms(values, title, label):
        legends[label] = list(values)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)

    monkeypatch.setattr("dualmcmc.tasks.outliers.histograms", histograms)
    values = {"in_distribution": torch.rand(9), "a": torch.rand(9), "b": torch.rand(9)}
    picture(Detection({"energy": values}, {"a": {"energy": {"auroc": 0.4996}}, "b": {"energy": {"auroc": 0.5}}}))
    assert legends == {"energy": ["in-distribution", "a  AUROC 0.500  worse than chance", "b  AUROC 0.500"]}


def test_scores(learned, own):
    images = MemoryStore(own.first(20))
    result = outliers(learned, images, {"others": images}, list(SCORES))
    x = from_uint8(images.tensor())
    energy = learned.energy(x).double()
    assert torch.allclose(result.scores["energy"]["in_distribution"], energy)
    train = data.load(learned.trained_data).train
    mean = learned.energy(from_uint8(train.tensor())).double().mean()
    assert torch.allclose(result.scores["typicality"]["in_distribution"], (energy - mean).abs(), atol=1e-6)
    rebuilt = learned.reconstruct(x, rng=learned.generator_for("z-chain"), temperature=None)
    error = (x - rebuilt).square().mean((1, 2, 3)).double()
    assert torch.allclose(result.scores["reconstruction"]["in_distribution"], error)
    with pytest.raises(UserError, match="cannot be called 'in_distribution'"):
        outliers(learned, images, {"in_distribution": images}, ["energy"])
    with pytest.raises(UserError, match=r"unknown score 'enregy'.*Did you mean 'energy'"):
        outliers(learned, images, {"others": images}, ["enregy"])


def test_diverged_run(learned, own, monkeypatch):
    monkeypatch.setattr(learned, "energy", lambda x: x[:, 0, 0, 0] * torch.nan)
    with pytest.raises(UserError, match="the energy of some images of in_distribution is not finite"):
        outliers(learned, own, {"others": own}, ["energy"])
