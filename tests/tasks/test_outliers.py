import numpy as np
import pytest
import torch

from dualmcmc import data
from dualmcmc.data.store import Memory, Subset
from dualmcmc.errors import UserError
from dualmcmc.pictures import from_uint8
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.outliers import SCORES, outliers, picture


@pytest.fixture
def known(learned):
    return images_for(learned, None).store


def test_a_set_against_itself_is_a_coin_toss(learned, known):
    halves = np.random.default_rng(0).permutation(len(known))
    half, other = Subset(known, halves[:180]), Subset(known, halves[180:])
    for name, numbers in outliers(learned, half, {"other": other}, list(SCORES)).numbers["other"].items():
        assert numbers["auroc"] == pytest.approx(0.5, abs=0.1), name  # its standard error is 0.03
    assert outliers(learned, known, {"same": known}, ["energy"]).numbers["same"]["energy"]["auroc"] == 0.5


def test_noise_is_told_from_digits(learned, known):
    noise = Memory(torch.randint(0, 256, (100, 1, 8, 8), dtype=torch.uint8))
    result = outliers(learned, known, {"noise": noise}, list(SCORES))
    assert result.numbers["noise"]["reconstruction"]["auroc"] > 0.95
    assert picture(result).shape[0] == 3
    assert {name: len(values) for name, values in result.scores["energy"].items()} == {"known": 359, "noise": 100}


def test_scores_are_what_they_say(learned, known):
    images = Memory(known.first(20))
    result = outliers(learned, images, {"others": images}, list(SCORES))
    x = from_uint8(images.tensor())
    energy = learned.energy(x).double()
    assert torch.allclose(result.scores["energy"]["known"], energy)
    train = data.load(learned.config.data).train
    middle = learned.energy(from_uint8(train.tensor())).double().mean()
    assert torch.allclose(result.scores["typicality"]["known"], (energy - middle).abs(), atol=1e-6)
    rebuilt = learned.reconstruct(x, rng=learned.stream("z-chain"))
    error = (x - rebuilt).square().mean((1, 2, 3)).double()
    assert torch.allclose(result.scores["reconstruction"]["known"], error)
    with pytest.raises(UserError, match="cannot be called 'known'"):
        outliers(learned, images, {"known": images}, ["energy"])
    with pytest.raises(UserError, match=r"no score 'enregy'.*Did you mean 'energy'"):
        outliers(learned, images, {"others": images}, ["enregy"])


def test_a_diverged_run_is_said_to_be(learned, known, monkeypatch):
    monkeypatch.setattr(learned, "energy", lambda x: x[:, 0, 0, 0] * torch.nan)
    with pytest.raises(UserError, match="the energy of some images of known is not finite"):
        outliers(learned, known, {"others": known}, ["energy"])
