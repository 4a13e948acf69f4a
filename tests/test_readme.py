"""README's example runs as printed, and is as short as promised."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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


def test_the_example_of_using_a_run_runs(finished_run):
    text = (ROOT / "docs" / "using.md").read_text()
    (code,) = re.findall(r"<!-- using -->\n```python\n(.*?)```", text, re.S)
    names: dict = {}
    code = code.replace("runs/digits", str(finished_run)).replace("inference+10", "inference+2")
    exec(compile(code, "using.md", "exec"), names)
    assert names["path"].shape == (2, 9, 1, 8, 8)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
