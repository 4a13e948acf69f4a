from pathlib import Path

from dualmcmc.report.ranges import HEALTHY, table

PAGE = Path(__file__).parents[2] / "docs" / "health.md"


def test_the_documentation_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")


def test_ranges_are_ranges():
    for span in HEALTHY.values():
        assert span.low < span.high < span.limit
