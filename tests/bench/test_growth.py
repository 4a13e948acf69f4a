import pytest

from dualmcmc import settings
from dualmcmc.bench import growth
from tests.conftest import TINY, assert_refused, tiny


def test_the_line_through_the_points():
    line = growth._line([(1, 3.0), (2, 5.0), (4, 9.0)])
    assert line == pytest.approx({"slope": 2.0, "start": 1.0, "r2": 1.0})
    assert growth._line([(1, 1.0), (2, 4.0), (3, 1.0)])["r2"] == pytest.approx(0.0)


def test_everything_grows(call, tmp_path):
    changes = [*TINY, "data.size=16", "teaching.x_chain.steps=4", "teaching.z_chain.steps=4", "train.batch=8"]
    answer = call(
        "bench", "growth", "digits", *changes, "--repeats", 1, "--device", "cpu", "--json", "--out", tmp_path / "g.png"
    )
    assert answer.code == 0, answer.err
    axes = answer.json["axes"]
    assert [value for value, _ in axes["k_x"]["points"]] == [1, 2, 4, 6, 8]
    assert [value for value, _ in axes["k_z"]["points"]] == [1, 2, 4, 6, 8]
    assert [value for value, _ in axes["batch"]["points"]] == [2, 4, 8, 16]
    assert [value for value, _ in axes["pixels"]["points"]] == [64, 144, 256]
    assert all(seconds > 0 for axis in axes.values() for _, seconds in axis["points"])
    assert (tmp_path / "g.png").read_bytes()[:4] == b"\x89PNG"
    words = growth.in_words(answer.json)
    assert "steps of the x-chain" in words
    assert len(words.splitlines()) == 5


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("digits", [], [8, 10, 12, 16]),  # nothing smaller fits
        ("mnist", [], [14, 28]),
        ("cifar10-resnet", [], [16, 24, 32]),
        ("celeba64", [], [48, 64]),  # at 32 it would be another network
        ("celebahq256", [], [128, 192, 256]),
    ],
)
def test_sizes_are_those_the_networks_take(preset, changes, expected):
    assert growth._sides(settings.load_config(preset, changes)) == expected


def test_a_chain_without_steps_does_not_grow(monkeypatch):
    monkeypatch.setattr(growth.timing, "seconds", lambda *_: 1.0)
    found = growth.measure(tiny("teaching.x_chain.steps=0"), "cpu")
    assert list(found["axes"]) == ["k_z", "batch", "pixels"]
    assert len(growth.in_words(found).splitlines()) == 4


def test_what_cannot_be_had_is_said(monkeypatch):
    monkeypatch.setattr(growth.timing, "seconds", lambda *_: 1.0)
    said = []
    growth.measure(tiny("engine.precision=tf32"), "cpu", say=said.append)
    assert sum("tf32" in line for line in said) == 1


def test_more_steps_are_really_run(monkeypatch):
    """What is timed has the steps it is said to have."""
    seen = []
    monkeypatch.setattr(growth.timing, "seconds", lambda work, *_: (seen.append(work.config), 1.0 + len(seen))[1])
    growth.measure(tiny("data.size=16", "teaching.x_chain.steps=4"), "cpu")
    assert [config.teaching.x_chain.steps for config in seen[:5]] == [1, 2, 4, 6, 8]
    assert {config.teaching.x_chain.steps for config in seen[5:]} == {4}
    assert {config.data.size for config in seen} == {8, 12, 16}


def test_a_plot_that_cannot_be_written_is_refused_first(call, tmp_path):
    assert_refused(call("bench", "growth", "--out", tmp_path / "g.pdf"), ".png")
