import pytest
import torch

import dualmcmc
import inception
from dualmcmc import data
from dualmcmc.metrics.inception import FeatureExtractor
from tests.networks import Tiny


class Rounded(Tiny):
    def forward(self, x):
        return super().forward(x).half().float()


def test_compares_precisions(finished_run):
    run = dualmcmc.load(finished_run, "cpu")
    extractors = [FeatureExtractor(net, 48, "cpu", False, "tiny") for net in (Tiny(), Rounded())]
    result = inception.measure(run, extractors, 120)
    exact, rounded = result["rows"]
    assert set(exact["distances"]) == {
        "test - train", "generator - train", "EBM - train", "generator - EBM", "train, first half - train, second half"
    }  # fmt: skip
    for pair, value in exact["distances"].items():
        assert rounded["distances"][pair] == pytest.approx(value, abs=1e-3)
        assert rounded["distances"][pair] != value
        assert rounded["mixed"][pair] == pytest.approx(value, abs=1e-3)
        assert rounded["mixed"][pair] not in (value, rounded["distances"][pair])
    assert exact["mixed"] == exact["distances"]
    lines = inception.format_result(result).splitlines()
    assert len(lines) == 3 + 2 * 5
    assert f"{exact['distances']['test - train']:.5f}" in lines[3]


def test_sets_of_images(finished_run):
    run = dualmcmc.load(finished_run, "cpu")
    sets = inception.gather_images(run, 101)
    train = data.load(run.config.data).train.tensor()
    assert torch.equal(sets["train"], train[:101])
    assert torch.equal(torch.cat([sets["train, first half"], sets["train, second half"]]), sets["train"])
    assert sets["EBM"].shape == sets["generator"].shape == (101, 1, 8, 8)
    assert sets["EBM"].dtype == torch.uint8
    assert not torch.equal(sets["EBM"], sets["generator"])
