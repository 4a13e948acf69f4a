"""README's example runs as printed, and is as short as promised."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_on_ones_own_modules_runs():
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 30
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["samples"].shape == (64, 2)
    assert torch.isfinite(names["samples"]).all()
    assert torch.isfinite(names["stats"]["energy_gap"])


def test_the_example_on_a_trained_run_runs(finished_run):
    (code,) = re.findall(r"A trained run:\n\n```python\n(.*?)```", README, re.S)
    names: dict = {}
    exec(compile(code.replace("runs/digits", str(finished_run)), "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape == (64, 1, 8, 8)


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
