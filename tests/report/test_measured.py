from dualmcmc.report.measured import measured


def entry(**changes):
    return {
        "task": "evaluate",
        "time": "2026-01-01T00:00:00Z",
        "command": "dualmcmc evaluate r",
        "numbers": {},
    } | changes


def test_nothing_measured_nothing_shown():
    assert measured([]) == ""
    assert measured([entry(task="unknown")]) == ""


def test_numbers_and_how_they_came_about():
    numbers = {"generator": {"fid": 8.934}, "ebm": {"fid": 7.861}, "energy": [1.0, 0.5, 0.25], "finite": True}
    page = measured(
        [
            entry(
                numbers=numbers,
                samples=50_000,
                seed=3,
                commit="abc",
                left_out={"is": "no classifier"},
                x_chain={"steps": 70, "step_size": 0.08},
            )
        ]
    )
    for words in (
        "generator fid <b>8.934</b>",
        "ebm fid <b>7.861</b>",
        "energy <b>1 to 0.25</b>",
        "finite <b>True</b>",
    ):
        assert words in page
    for words in ("dualmcmc evaluate r", "50000 samples", "seed 3", "commit abc", "is left out: no classifier"):
        assert words in page


def test_a_record_cannot_smuggle_in_markup():
    bad = "<script>alert(1)</script>"
    page = measured(
        [
            entry(
                command=bad,
                numbers={bad: bad},
                samples=bad,
                time=bad,
                data={"source": bad},
                left_out={bad: bad},
                seed=bad,
            )
        ]
    )
    assert "<script>" not in page
    assert measured([entry(left_out="odd", data="odd", numbers={"a": None, "b": ["x"], "c": []})])


def test_the_newest_come_first_and_not_for_ever():
    page = measured([entry(time=f"2026-01-{day:02}") for day in range(1, 31)])
    assert page.index("2026-01-30") < page.index("2026-01-29")
    assert "2026-01-10" not in page
