import sys

import pytest

from dualmcmc import progress


def test_nothing_is_shown_unless_asked_for(capsys):
    with progress.quiet("reading", 10, "images") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("unit", "words"),
    [("images", "3 images of 10 images"), ("bytes", "0.0 MB of 0.0 MB"), ("parts", "3 parts of 10 parts, ")],
)
def test_plain_lines_where_nobody_looks(capsys, monkeypatch, unit, words):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.show("reading", 10, unit) as advance:
        advance(1)  # after 6 seconds: too early to say anything
        assert capsys.readouterr().err == ""
        advance(2)
    printed = capsys.readouterr().err
    assert printed.startswith("reading: " + words)
    assert "min left" in printed
    assert len(printed.splitlines()) == 1


def test_a_number_that_is_not_known(capsys, monkeypatch):
    clock = iter(range(0, 1000, 12))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.show("reading", None, "images") as advance:
        advance(24)
    assert capsys.readouterr().err.strip() == "reading: 24 images, 2 images/s"


@pytest.mark.parametrize("unit", ["images", "bytes", "parts"])
@pytest.mark.parametrize("total", [10, None])
def test_a_bar_where_people_look(capsys, monkeypatch, unit, total):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.show("reading [a] set", total, unit) as advance:
        advance(10)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "reading [a] set" in printed.err
    assert "10" in printed.err
