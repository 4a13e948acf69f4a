"""Prints the number of fuzz cases at the end, including those of pytest-xdist's workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security import cases

_worker_cases: list[int] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["fuzz_cases"] = cases.run


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    _worker_cases.append(getattr(node, "workeroutput", {}).get("fuzz_cases", 0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    total = cases.run + sum(_worker_cases)
    if total:
        terminalreporter.write_line(f"fuzz cases run: {total:,}")
