import pytest

import growth
from dualmcmc import config_io
from tests.conftest import TINY, tiny


def test_line_fit():
    assert growth.fit_line([(1, 3.0), (2, 5.0), (4, 9.0)]) == pytest.approx({"slope": 2.0, "intercept": 1.0, "r2": 1.0})
    assert growth.fit_line([(1, 1.0), (2, 4.0), (3, 1.0)])["r2"] == pytest.approx(0.0)
    assert growth.fit_line([(7, 2.0)]) == {"slope": 0.0, "intercept": 2.0, "r2": 1.0}


def test_measures_all_axes(run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(growth.timing, "median_seconds", lambda step, *_: step() or 0.5)
    changes = [*TINY, "data.size=16", "teaching.x_chain.steps=4", "teaching.z_chain.steps=4", "train.batch=8"]
    answer = run_script("growth.py", *changes, "--device", "cpu", "--json", "--out", tmp_path / "growth.png")
    assert answer.code == 0, answer.err
    axes = answer.json["axes"]
    assert {name: [value for value, _ in axis["points"]] for name, axis in axes.items()} == {
        "k_x": [1, 2, 4, 6, 8],
        "k_z": [1, 2, 4, 6, 8],
        "batch": [2, 4, 8, 16],
        "pixels": [64, 144, 256],
    }
    assert "x-chain steps 8: 500.00 ms" in answer.err
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"
    lines = growth.format_result(answer.json).splitlines()
    assert len(lines) == 5
    assert lines[1].startswith("x-chain steps")


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("digits", [8, 10, 12, 16]),  # no smaller size is supported
        ("mnist", [14, 28]),
        ("cifar10-resnet", [16, 24, 32]),
        ("celeba64", [48, 64]),  # 32 would be another architecture
        ("celebahq256", [128, 192, 256]),
    ],
)
def test_image_sizes(preset, expected):
    assert growth.image_sizes(config_io.load_config(preset)) == expected


def test_chain_without_steps_is_skipped(monkeypatch):
    monkeypatch.setattr(growth.timing, "median_seconds", lambda *_: 1.0)
    result = growth.measure(tiny("teaching.x_chain.steps=0"), "cpu")
    assert list(result["axes"]) == ["k_z", "batch", "pixels"]
    assert len(growth.format_result(result).splitlines()) == 4


def test_plan_notes_are_shown(monkeypatch):
    monkeypatch.setattr(growth.timing, "median_seconds", lambda *_: 1.0)
    messages = []
    growth.measure(tiny("engine.precision=tf32"), "cpu", notify=messages.append)
    assert sum("tf32" in message for message in messages) == 1


def test_steps_have_the_measured_values(monkeypatch):
    configs = []
    monkeypatch.setattr(growth.timing, "median_seconds", lambda step, *_: configs.append(step.config) or 1.0)
    growth.measure(tiny("data.size=16", "teaching.x_chain.steps=4", "teaching.z_chain.steps=2"), "cpu")
    assert [config.teaching.x_chain.steps for config in configs] == [1, 2, 4, 6, 8] + [4] * 11
    assert [config.teaching.z_chain.steps for config in configs[5:9]] == [1, 2, 3, 4]
    assert [config.train.batch for config in configs[9:13]] == [4, 8, 16, 32]
    assert [config.data.size for config in configs[13:]] == [8, 12, 16]
