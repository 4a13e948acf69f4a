import sys
import threading
import time
from types import SimpleNamespace

import pytest

from dualmcmc.utils import progress
from dualmcmc.utils.notebook import NotebookBar, in_notebook

STATS = {"energy_gap": 0.5, "energy_slope": 0.1, "reconstruction_mse": 0.01, "z_displacement_rms": 0.2}


def test_no_progress_prints_nothing(capsys):
    with progress.no_progress("reading", 10, "images") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: `clock[0] = seconds`."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


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


def test_line_reporter(capsys, clock):
    reporter = progress.make_reporter()  # standard error is not a terminal here
    assert isinstance(reporter, progress.LineReporter)
    reporter.message("hello")
    reporter.start(0, 1000)
    for iteration in range(1, 12):
        clock[0] += 1
        reporter.advance(10 * iteration, iteration)
    reporter.stats(STATS)
    reporter.stats(STATS)  # immediately afterwards: not printed
    reporter.stop()
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["hello", progress.LEGEND]
    assert len(printed) == 3
    for text in ("110/1,000 images", "1 it/s", "89 s left", "gap 0.5"):
        assert text in printed[2]


def test_more_than_the_total(capsys, clock):
    """The last batch may be larger than what is left."""
    reporter = progress.LineReporter()
    reporter.start(0, 50)
    reporter.advance(30, 1)
    clock[0] += 20
    reporter.advance(100, 2)
    reporter.stats(STATS)
    assert "50/50 images  0.05 it/s  gap" in capsys.readouterr().err


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


@pytest.fixture
def notebook(monkeypatch):
    """What a notebook shows below a cell: the states of each display, in order."""
    displays = []

    def display(thing, display_id):
        assert display_id is True
        states = [thing._repr_html_()]
        displays.append(states)
        return SimpleNamespace(update=lambda thing: states.append(thing._repr_html_()))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    return displays


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


def test_notebook_reporter(notebook, clock, capsys):
    reporter = progress.make_reporter()
    reporter.message("hello")
    reporter.start(0, 1000)
    for iteration in range(1, 100):
        clock[0] += 0.01
        reporter.advance(10 * iteration, iteration)
    reporter.stats(STATS)
    reporter.stop()
    assert capsys.readouterr() == (f"hello\n{progress.LEGEND}\n", "")
    (states,) = notebook
    assert len(states) == 3  # at 0, 0.5 seconds and the end, not for every iteration
    assert states[-1].startswith('<progress value="0.990"></progress> <code>train: 990/1k  100 it/s')
    assert "gap 0.5" in states[-1]


def test_notebook_reporter_before_training(notebook):
    progress.NotebookReporter().stop()
    assert notebook == []
