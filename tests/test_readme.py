"""The Python examples in the documentation run as printed."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def run_example(page, marker, **replacements):
    """Run the Python block after <!-- marker -->; returns its variables."""
    (code,) = re.findall(rf"<!-- {marker} -->\n```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    for old, new in replacements.items():
        code = code.replace(old, str(new))
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    return names


def test_quick_start(finished_run):
    names = run_example("README.md", "quick start", **{"cifar10-simple": finished_run})
    assert names["y"].shape == names["x"].shape == (16, 1, 8, 8)
    assert names["e"].shape == (16,)


def test_own_networks(tmp_path):
    shorter = {"data=points)  # res": "data=points, max_images=2500)  # res", "runs/mine": tmp_path / "mine"}
    names = run_example("README.md", "own networks", **shorter)
    assert names["samples"].shape == (64, 2)
    assert names["run"].images == 2500


def test_own_networks_guide(tmp_path):
    shorter = {"max_images=500_000": "max_images=1000", "data=points)  # an": "data=points, max_images=2000)  # an"}
    names = run_example("docs/guide/own-networks.md", "own networks", **shorter, **{"runs/mine": tmp_path / "mine"})
    assert names["run"].images == 2000
    assert names["numbers"].reconstruction["inference"]["mse"] > 0


def test_own_loop():
    names = run_example("docs/reference/python.md", "example")
    assert names["samples"].shape == (64, 2)
    assert torch.isfinite(names["samples"]).all()
    assert torch.isfinite(names["stats"]["energy_gap"])


def test_studying_chains():
    names = run_example("docs/reference/python.md", "chains")
    assert names["metropolis"]
    assert torch.allclose(names["draws"].var((0, 1)), torch.tensor([1.0, 4.0]), rtol=0.1)
    assert 0.5 < names["trace"].acceptance_rate < 1


def test_trained_run(finished_run):
    names = run_example("docs/reference/python.md", "run", **{"runs/digits": finished_run})
    assert names["y"].shape == names["x"].shape == (64, 1, 8, 8)


def test_using_a_run(finished_run):
    names = run_example("docs/guide/using.md", "using", **{"runs/digits": finished_run, "inference+10": "inference+2"})
    assert names["path"].shape == (2, 9, 1, 8, 8)


def test_own_tracker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_example("docs/guide/trackers.md", "own tracker", **{'"runs/csv", on': '"runs/csv", max_images=5000, on'})
    rows = [line.split(",") for line in (tmp_path / "curves.csv").read_text().split()]
    assert [int(images) for images, _ in rows] == [2500, 5000]
