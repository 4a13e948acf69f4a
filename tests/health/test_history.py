import math

import pytest

from dualmcmc.health.history import History, curve, effective_lines, parse_number


def train(images, **values):
    return {"kind": "train", "images": images, **values}


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (0.5, 0.5), ("inf", math.inf), ("-Infinity", -math.inf), (10**400, math.inf)]
    + [(value, None) for value in ("1", "", None, True, [], {})],
)
def test_parse_number(value, number):
    assert parse_number(value) == number


def test_parse_nan():
    assert math.isnan(parse_number("NaN"))


def test_repeated_and_undone_lines_do_not_count():
    repeated = [train(1), train(2), train(3), train(2), train(4)]
    assert [line["images"] for line in effective_lines(repeated)] == [1, 2, 4]
    undone = [train(1), train(2), train(3), {"kind": "rollback", "images": 1}, train(2)]
    assert [line["images"] for line in effective_lines(undone)] == [1, 2]


def test_curve_skips_what_is_not_finite():
    lines = [train(1, gap=0.5), train(2, gap="nan"), train(3), train(10**400, gap=1), train(4, gap=-1)]
    assert curve(lines, "gap") == [(1, 0.5), (4, -1)]


def test_windows():
    history = History([train(n, gap=float(n)) for n in range(1, 41)])
    assert history.early("gap") == [float(n) for n in range(1, 11)]
    assert history.recent("gap") == [float(n) for n in range(31, 41)]
    assert history.images == 40


def test_lowest_ignores_single_values():
    values = [5.0] * 40
    values[20] = -100.0
    values[30:35] = [2.0] * 5
    assert History([train(n, mse=value) for n, value in enumerate(values)]).lowest("mse") == 2.0
