import sys

import pytest

from dualmcmc.utils import progress

STATS = {"energy_gap": 0.5, "energy_slope": 0.1, "reconstruction_mse": 0.01, "z_displacement_rms": 0.2}


def test_no_progress_prints_nothing(capsys):
    with progress.no_progress("reading", 10, "images") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("unit", "text"),
    [("images", "3 of 10 images"), ("bytes", "0.0 MB of 0.0 MB"), ("parts", "3 of 10 parts, ")],
)
def test_lines(capsys, monkeypatch, unit, text):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.show_progress("reading", 10, unit) as advance:
        advance(1)  # after 6 seconds: too early for a line
        assert capsys.readouterr().err == ""
        advance(2)
    printed = capsys.readouterr().err
    assert printed.startswith("reading: " + text)
    assert "min left" in printed
    assert len(printed.splitlines()) == 1


def test_lines_without_a_total(capsys, monkeypatch):
    clock = iter(range(0, 1000, 12))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.show_progress("reading", None, "images") as advance:
        advance(24)
    assert capsys.readouterr().err.strip() == "reading: 24 images, 2 images/s"


@pytest.mark.parametrize("unit", ["images", "bytes", "parts"])
@pytest.mark.parametrize("total", [10, None])
def test_bar(capsys, monkeypatch, unit, total):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.show_progress("reading [a] set", total, unit) as advance:
        advance(10)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "reading [a] set" in printed.err
    assert "10" in printed.err


def test_line_reporter(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    reporter = progress.make_reporter()  # standard error is not a terminal here
    assert isinstance(reporter, progress.LineReporter)
    reporter.message("hello")
    reporter.start(0, 1000)
    for iteration in range(1, 12):
        now += 1
        reporter.advance(10 * iteration, iteration)
    reporter.stats(STATS)
    reporter.stats(STATS)  # immediately afterwards: not printed
    reporter.stop()
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["hello", progress.LEGEND]
    assert len(printed) == 3
    for text in ("110/1,000 images", "it/s", "min left", "gap 0.5"):
        assert text in printed[2]


def test_more_than_the_total(capsys, monkeypatch):
    """The last batch may be larger than what is left."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    reporter = progress.LineReporter()
    reporter.start(0, 50)
    reporter.advance(30, 1)
    now += 20
    reporter.advance(100, 2)
    reporter.stats(STATS)
    assert "50/50 images  0.05 it/s  0.0 min left" in capsys.readouterr().err
    with progress.show_progress("reading", 50, "images") as advance:
        now += 20
        advance(100)
    assert capsys.readouterr().err.strip() == "reading: 50 of 50 images, 5 images/s, 0.0 min left"


@pytest.mark.parametrize(("rate", "text"), [(0, "0"), (0.034, "0.034"), (0.5, "0.5"), (9.87, "9.9"), (1234.5, "1,234")])
def test_rates(rate, text):
    assert progress.format_rate(rate) == text


def test_bar_reporter(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter = progress.make_reporter()
    assert isinstance(reporter, progress.BarReporter)
    reporter.start(0, 100)
    for iteration in range(1, 5):
        reporter.advance(10 * iteration, iteration)
    reporter.stats(STATS)
    reporter.stop()
    assert "40/100" in capsys.readouterr().err
