import start
from tests.conftest import TINY


def test_measures_an_empty_and_a_filled_cache(run_script):
    answer = run_script("start.py", "digits", *TINY, "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    result = answer.json
    for name in ("empty cache", "filled cache"):
        measured = result["starts"][name]
        assert measured["engine"] == "eager, float32"
        seconds = measured["seconds"]
        assert seconds["compilation"] == 0
        assert 0 < seconds["imports"] < seconds["first iteration"] < seconds["8 iterations"]
    assert start.format_result(result).count("first iteration") == 2


def test_compilation_is_timed(monkeypatch):
    now = iter([10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(start.time, "monotonic", lambda: next(now))
    timer = start.CompilationTimer()
    for task in ("compiling", "features"):
        with timer.progress(task, 5, "parts") as advance:
            advance(1)
    assert timer.seconds == 3


def test_bad_input(run_script):
    answer = run_script("start.py", "digits", *TINY, "train.cooldown=2")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
