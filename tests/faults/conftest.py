"""Counts of what was survived, printed at the end."""

import pytest

COUNTS = pytest.StashKey[dict[str, int]]()


@pytest.fixture
def count(request):
    """Adds to a printed count."""
    counts = request.config.stash.setdefault(COUNTS, {})

    def add(what, number=1):
        counts[what] = counts.get(what, 0) + number

    return add


def pytest_terminal_summary(terminalreporter, config):
    for what, number in config.stash.get(COUNTS, {}).items():
        terminalreporter.write_line(f"{what}: {number:,}")
