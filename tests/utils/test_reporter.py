import sys

from dualmcmc.utils import reporter

STATS = {"energy_gap": 0.5, "energy_slope": 0.1, "reconstruction_mse": 0.01, "z_displacement_rms": 0.2}


def test_line_reporter(capsys, clock):
    shown = reporter.make_reporter()  # standard error is not a terminal here
    assert isinstance(shown, reporter.LineReporter)
    shown.message("hello")
    shown.start(0, 1000)
    for iteration in range(1, 12):
        clock[0] += 1
        shown.advance(10 * iteration, iteration)
    shown.stats(STATS)
    shown.stats(STATS)  # immediately afterwards: not printed
    shown.stop()
    printed = capsys.readouterr().err.splitlines()
    assert printed[:2] == ["hello", reporter.LEGEND]
    assert len(printed) == 3
    for text in ("110/1,000 images", "1 it/s", "89 s left", "gap 0.5"):
        assert text in printed[2]


def test_more_than_the_total(capsys, clock):
    """The last batch may be larger than what is left."""
    shown = reporter.LineReporter()
    shown.start(0, 50)
    shown.advance(30, 1)
    clock[0] += 20
    shown.advance(100, 2)
    shown.stats(STATS)
    assert "50/50 images  0.05 it/s  gap" in capsys.readouterr().err


def test_bar_reporter(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = reporter.make_reporter()
    assert isinstance(shown, reporter.BarReporter)
    shown.start(0, 100)
    for iteration in range(1, 5):
        shown.advance(10 * iteration, iteration)
    shown.stats(STATS)
    shown.stop()
    assert "40/100" in capsys.readouterr().err


def test_notebook_reporter(notebook, clock, capsys):
    shown = reporter.make_reporter()
    shown.message("hello")
    shown.start(0, 1000)
    for iteration in range(1, 100):
        clock[0] += 0.01
        shown.advance(10 * iteration, iteration)
    shown.stats(STATS)
    shown.stop()
    assert capsys.readouterr() == (f"hello\n{reporter.LEGEND}\n", "")
    (states,) = notebook
    assert len(states) == 3  # at 0, 0.5 seconds and the end, not for every iteration
    assert states[-1].startswith('<progress value="0.990"></progress> <code>train: 990/1k  100 it/s')
    assert "gap 0.5" in states[-1]


def test_notebook_reporter_before_training(notebook):
    reporter.NotebookReporter().stop()
    assert notebook == []
