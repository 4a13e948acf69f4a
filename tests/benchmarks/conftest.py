from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run `python benchmarks/SCRIPT.py WORDS` in this process."""

    def run(script: str, *words: object) -> Answer:
        path = str(SCRIPTS / script)
        monkeypatch.setattr(sys, "argv", [path, *map(str, words)])
        code = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        printed = capsys.readouterr()
        return Answer(code, printed.out, printed.err)

    return run
