import pytest

import evaluate
from tests.conftest import tiny
from tests.networks import Tiny


def test_times_of_all_parts(monkeypatch):
    monkeypatch.setattr(evaluate, "FEATURE_DIM", 48)
    monkeypatch.setattr(evaluate, "Inception", Tiny)
    result = evaluate.measure(tiny(), 100, "cpu")
    assert result["samples"] == 100
    assert set(result["seconds_by_part"]) == {"sampling", "features", "distance"}
    assert result["features_per_second"] == pytest.approx(200 / result["seconds_by_part"]["features"])
    assert sum(result["seconds_by_part"].values()) <= result["seconds"]
    table = evaluate.format_result(result)
    assert "100 samples, x-chain of 3 steps" in table
    assert "samples/s" in table
