import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc.errors import UserError
from dualmcmc.tasks.sample import long_run, sample


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_samples_as_pixels_and_as_a_picture(run, tmp_path):
    numbers = sample(run, 9, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as stored:
        assert stored["generator"].shape == stored["revised"].shape == (9, 8, 8, 1)
        assert stored["revised"].dtype == np.uint8
    assert numbers["steps"] == 3
    sample(run, 9, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[0] > 2 * 3 * 64
    for bad in ("a.jpg", "absent/a.png"):
        with pytest.raises(UserError, match="--out"):
            sample(run, 9, tmp_path / bad)
    with pytest.raises(UserError, match="-n"):
        sample(run, 0, tmp_path / "a.png")


def test_an_npz_has_the_samples_themselves_in_their_order(finished_run, tmp_path):
    run, again = (dualmcmc.load(finished_run, "cpu", seed=3, overrides=["sampling.batch=4"]) for _ in range(2))
    sample(run, 10, tmp_path / "a.npz")
    parts = list(again.draw(10))
    assert [(first, len(start)) for first, start, _ in parts] == [(0, 4), (4, 3), (7, 3)]
    with np.load(tmp_path / "a.npz") as stored:
        for name, which in (("generator", 1), ("revised", 2)):
            expected = dualmcmc.pictures.to_uint8(torch.cat([part[which] for part in parts])).permute(0, 2, 3, 1)
            assert (stored[name] == expected.numpy()).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]


def test_an_npz_that_fails_half_way_leaves_nothing(run, tmp_path, monkeypatch):
    def breaks(n):
        yield from list(run.__class__.draw(run, 4))
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(run, "draw", breaks)
        with pytest.raises(RuntimeError, match="half way"):
            sample(run, 9, tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []

    def stopped(*files):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", stopped)  # while the second array goes in
    with pytest.raises(KeyboardInterrupt):
        sample(run, 9, tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


def test_generator_samples_do_not_depend_on_the_chain(finished_run, tmp_path):
    for steps in (0, 5):
        run = dualmcmc.load(finished_run, "cpu", overrides=["sampling.batch=4", f"sampling.steps={steps}"])
        sample(run, 10, tmp_path / f"{steps}.npz")
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "5.npz") as second:
        assert (first["generator"] == second["generator"]).all()
        assert (first["revised"] != second["revised"]).any()


def test_memory_does_not_grow_with_the_samples(run, tmp_path, monkeypatch):
    """20,000 images of 64x64 RGB, 490 MB as bytes of both kinds: only a part of them is alive at any time."""
    alive, most = set(), 0

    def draw(n):
        nonlocal most
        for number in range(n // 500):
            part = torch.rand(500, 3, 64, 64)
            alive.add(number)
            weakref.finalize(part, alive.discard, number)
            most = max(most, len(alive))
            yield 500 * number, part, part

    monkeypatch.setattr(run, "draw", draw)
    monkeypatch.setattr(run, "energy", lambda x: x[:, 0, 0, 0].clone())
    run.config = dualmcmc.load_config("celeba64")
    tracemalloc.start()
    sample(run, 20_000, tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.npz").stat().st_size > 2 * 20_000 * 64 * 64 * 3
    assert most <= 2
    assert peak < 50e6  # of Python's own objects: bytes on their way to the file


def test_the_x_chain_lowers_the_energy(run, tmp_path):
    run = dualmcmc.load(run.file, "cpu", overrides=["sampling.steps=30"])
    numbers = sample(run, 64, tmp_path / "a.npz")
    assert numbers["energy_revised"] < numbers["energy_generator"]
    assert numbers["x_moved"] > 0


def test_a_long_run_is_followed(learned):
    result = long_run(learned, 5, 200)
    numbers = result.numbers
    assert numbers["finite"]
    assert numbers["energy_end"] < numbers["energy_start"]
    assert 0 < numbers["moved_half"] < numbers["moved_end"]
    assert numbers["kept_at"] == list(range(0, 201, 20))
    assert numbers["outside_range_at"][0] == 0  # tanh
    assert result.picture.shape[0] == 3
    with pytest.raises(UserError, match="at most 500 chains"):
        long_run(learned, 501, 10)
    for n, steps in ((0, 10), (5, 0)):
        with pytest.raises(UserError, match="at least one"):
            long_run(learned, n, steps)


def test_a_long_run_that_leaves_the_range_is_seen(learned, monkeypatch):
    def steep(x, steps, rng, trace):
        return dualmcmc.revise_x(
            lambda y: -y.sum((1, 2, 3)), x, dualmcmc.Chain(steps=steps, temperature=0), None, trace
        )

    monkeypatch.setattr(learned, "revise_x", steep)
    numbers = long_run(learned, 3, 500).numbers
    assert numbers["largest_pixel"] == pytest.approx(5, abs=1.1)
    assert numbers["outside_range"] == 1
