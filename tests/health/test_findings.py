from pathlib import Path

from dualmcmc.health.findings import HEALTHY_RANGES, Finding, format_findings, table

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "health.md"


def test_docs_contain_the_table():
    assert table() in PAGE.read_text(encoding="utf-8")


def test_ranges_are_ordered():
    for healthy in HEALTHY_RANGES.values():
        assert healthy.low < healthy.high < healthy.limit


def test_format_findings():
    findings = [
        Finding("ok", "speed", "10 iterations per second."),
        Finding("warning", "energy_gap", "It grows.", "a=1"),
        Finding("ok", "log", "Short."),
        Finding("error", "diverged", "At image 5.", "b=2"),
        Finding("ok", "saves", "Quick."),
    ]
    assert format_findings(findings) == [
        "error   diverged: At image 5.",
        "advice  b=2",
        "warning energy_gap: It grows.",
        "advice  a=1",
        "note    Short.",
        "ok      speed, saves",
    ]
    assert format_findings([]) == []
