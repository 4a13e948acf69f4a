"""`make test`, the pre-commit hooks and CI run the same checks."""

import re
import tomllib
from pathlib import Path

import yaml

import dualmcmc

ROOT = Path(__file__).parents[1]


def make_commands(target: str) -> list[str]:
    """The recipe of a Makefile target."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]


def test_pre_commit_runs_the_checks_of_make_test():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"  # no network
    assert [hook["entry"].removeprefix("env ") for hook in repo["hooks"]] == make_commands("test")
    *checks, tests = repo["hooks"]
    assert all("stages" not in hook for hook in checks)
    assert tests["stages"] == ["pre-push", "manual"]
    assert not any(hook["pass_filenames"] for hook in repo["hooks"])


def test_ci_runs_make_test():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "set -euo pipefail" in script
    assert script[-1] == "make test"
    assert "\nmake test" in (ROOT / "README.md").read_text()


def test_every_dependency_is_pinned():
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*config["build-system"]["requires"], *config["project"]["dependencies"]]
    for extra in config["project"]["optional-dependencies"].values():
        requirements += extra
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}
    assert names - {"dualmcmc"} <= pins


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # required by the format
    assert citation["version"] == dualmcmc.__version__
    (paper,) = citation["references"]
    assert paper["title"] == "Learning Energy-based Model via Dual-MCMC Teaching"
    assert [author["family-names"] for author in paper["authors"]] == ["Cui", "Han"]
