import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dualmcmc.utils import progress
from dualmcmc.utils.notebook import NotebookBar, in_notebook


def test_no_progress_prints_nothing(capsys):
    with progress.no_progress("reading", 10, "images") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("images", "15 of 64 images, 1.5/s, 33 s left"),
        ("bytes", "0.0 MB of 0.0 MB, 0.0 MB/s, 33 s left"),
        ("parts", "15 of 64 parts, 33 s left"),
        ("steps", "15 of 64 steps, 1.5/s, 33 s left"),
    ],
)
def test_state(clock, unit, text):
    pace = progress.Pace(64)
    assert progress._format_state(pace, unit) == text.split(", ")[0].replace("15", "0")  # nothing is known yet
    clock[0] += 10
    pace.advance(15)
    assert progress._format_state(pace, unit) == text


def test_state_without_a_total(clock):
    pace = progress.Pace(None)
    clock[0] += 12
    pace.advance(24)
    assert progress._format_state(pace, "images") == "24 images, 2/s"


def test_remaining_time(clock):
    pace = progress.Pace(100)
    clock[0] += 0.5
    pace.advance(1)
    assert pace.seconds_left is None  # too early
    clock[0] += 9.5
    pace.advance(19)
    assert pace.seconds_left == pytest.approx(40)
    clock[0] += 30
    assert pace.seconds_left == pytest.approx(10)
    clock[0] += 30  # longer than it should take
    assert pace.seconds_left is None
    pace.advance(100)  # more than the total
    assert pace.seconds_left is None
    assert pace.done == 100


def test_parts_of_images_add_up():
    pace = progress.Pace(3)
    for _ in range(30):
        pace.advance(0.1)
    assert pace.done == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.4, "99 s"), (99.6, "2 min"), (5940, "99 min"), (5980, "1.7 h"), (90_000, "25.0 h")],
)
def test_durations(seconds, text):
    assert progress.format_duration(seconds) == text


def wait_for_output(capsys, *words):
    """What is printed until it contains `words`: the thread that prints has its own time."""
    printed, ended = "", time.monotonic() + 60
    while not all(word in printed for word in words) and time.monotonic() < ended:
        printed += capsys.readouterr().err
        time.sleep(0.01)
    assert all(word in printed for word in words), printed
    return printed


def test_lines_come_without_being_called(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.01)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.01)
    with progress.show_progress("reading", 10, "images") as advance:
        wait_for_output(capsys, "reading: 0 of 10 images\n")
        advance(3)
        wait_for_output(capsys, "reading: 3 of 10 images")
    capsys.readouterr()
    assert not [thread for thread in threading.enumerate() if "loop" in thread.name]


def test_short_work_prints_nothing(capsys):
    with progress.show_progress("reading", 10, "images") as advance, progress.waiting_for("loading"):
        advance(10)
    assert capsys.readouterr().err == ""


def test_waiting(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.01)
    with progress.waiting_for("loading PyTorch"):
        assert wait_for_output(capsys, "\n").startswith("loading PyTorch (")
    with pytest.raises(KeyError), progress.waiting_for("loading PyTorch"):
        raise KeyError


@pytest.mark.parametrize("unit", ["images", "bytes", "parts", "steps"])
@pytest.mark.parametrize("total", [10, None])
def test_bar(capsys, monkeypatch, unit, total):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.show_progress("reading [a] set", total, unit) as advance:
        advance(10)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "reading [a] set" in printed.err
    assert ("MB" if unit == "bytes" else "10") in printed.err


@pytest.mark.parametrize(("rate", "text"), [(0, "0"), (0.034, "0.034"), (0.5, "0.5"), (9.87, "9.9"), (1234.5, "1,234")])
def test_rates(rate, text):
    assert progress.format_rate(rate) == text


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch):
    for shell in (None, SimpleNamespace(config={})):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not in_notebook()


def test_notebook_bar(notebook, monkeypatch, capsys):
    monkeypatch.setattr(progress, "REDRAW_INTERVAL", 0.01)
    with progress.show_progress("reading <a>", 10, "images") as advance:
        advance(5)
        ended = time.monotonic() + 60
        while not notebook and time.monotonic() < ended:
            time.sleep(0.01)
        advance(5)
    (states,) = notebook
    assert '<progress value="0.500"></progress>' in states[0]
    assert '<progress value="1.000"></progress>' in states[-1]
    assert "reading &lt;a&gt;: 10 of 10 images" in states[-1]
    assert capsys.readouterr() == ("", "")


def test_notebook_bar_without_a_total(notebook):
    bar = NotebookBar()
    bar.update(None, "24 images")
    assert notebook == [["<progress></progress> <code>24 images</code>"]]
    assert repr(bar) == "24 images"


def test_short_work_shows_no_notebook_bar(notebook):
    with progress.show_progress("reading", 10, "images") as advance:
        advance(10)
    assert notebook == []
