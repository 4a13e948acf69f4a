from dualmcmc.engine import progress

RECORD = {"energy_gap": 0.5, "reconstruction_mse": 0.01, "x_moved": 0.1, "z_moved": 0.2}


def test_plain_lines_tell_rate_and_time_left(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.reporter()  # standard error is no terminal here
    lines.say("hello")
    lines.start(0, 1000)
    for iteration in range(1, 12):
        now += 1
        lines.advance(10 * iteration, iteration)
    lines.numbers(RECORD)
    lines.numbers(RECORD)  # at once again: not repeated
    lines.stop()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "hello"
    assert len(said) == 2
    assert "110/1,000 images" in said[1]
    assert "it/s" in said[1]
    assert "min left" in said[1]
    assert "gap 0.5" in said[1]


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    bar = progress.reporter()
    assert isinstance(bar, progress.Bar)
    bar.start(0, 100)
    for iteration in range(1, 5):
        bar.advance(10 * iteration, iteration)
    bar.numbers(RECORD)
    bar.stop()
    assert "40/100" in capsys.readouterr().err
