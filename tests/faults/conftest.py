"""The faults are tried a few times in CI, and often by `make faults`; what was counted is said at the end."""

import pytest

from tests.conftest import LONG

COUNTS = pytest.StashKey[dict[str, int]]()


@pytest.fixture
def often():
    """Whether this is the long form."""
    return LONG


@pytest.fixture
def count(request):
    """Adds to a figure that is printed at the end."""
    figures = request.config.stash.setdefault(COUNTS, {})

    def add(what, number=1):
        figures[what] = figures.get(what, 0) + number

    return add


def pytest_terminal_summary(terminalreporter, config):
    for what, number in config.stash.get(COUNTS, {}).items():
        terminalreporter.write_line(f"{what}: {number:,}")
