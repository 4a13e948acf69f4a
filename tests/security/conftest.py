"""Says at the end how many fuzz cases were run, those of pytest-xdist's workers too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security import cases

_of_workers: list[int] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz_cases"] = cases.run


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _of_workers.append(getattr(node, "workeroutput", {}).get("fuzz_cases", 0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    total = cases.run + sum(_of_workers)
    if total:
        terminalreporter.write_line(f"fuzz cases run: {total:,}")
