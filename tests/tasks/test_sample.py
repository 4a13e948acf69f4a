import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc.tasks.sample import sample
from dualmcmc.utils.errors import UserError


@pytest.fixture
def run(finished_run):
    return dualmcmc.load(finished_run, device="cpu")


def test_npz_and_png(run, tmp_path):
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


def test_npz_contains_the_samples_in_order(finished_run, tmp_path):
    run, again = (dualmcmc.load(finished_run, "cpu", seed=3, overrides=["sampling.batch=4"]) for _ in range(2))
    sample(run, 10, tmp_path / "a.npz")
    parts = list(again.sample_batches(10))
    assert [(first, len(start)) for first, start, _ in parts] == [(0, 4), (4, 3), (7, 3)]
    with np.load(tmp_path / "a.npz") as stored:
        for name, which in (("generator", 1), ("revised", 2)):
            expected = dualmcmc.utils.images.to_uint8(torch.cat([part[which] for part in parts])).permute(0, 2, 3, 1)
            assert (stored[name] == expected.numpy()).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]


def test_failure_leaves_no_file(run, tmp_path, monkeypatch):
    def failing(n):
        yield from list(run.__class__.sample_batches(run, 4))
        raise RuntimeError("halfway")

    with monkeypatch.context() as patch:
        patch.setattr(run, "sample_batches", failing)
        with pytest.raises(RuntimeError, match="halfway"):
            sample(run, 9, tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []

    def interrupted(*files):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", interrupted)  # while the second array is written
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


def test_memory_does_not_grow_with_n(run, tmp_path, monkeypatch):
    """4,000 images of 64x64 RGB, 98 MB for both kinds as uint8: at most two batches exist at any time."""
    alive, peak_alive = set(), 0

    def sample_batches(n):
        nonlocal peak_alive
        for number in range(n // 200):
            part = torch.rand(200, 3, 64, 64)
            alive.add(number)
            weakref.finalize(part, alive.discard, number)
            peak_alive = max(peak_alive, len(alive))
            yield 200 * number, part, part

    monkeypatch.setattr(run, "sample_batches", sample_batches)
    monkeypatch.setattr(run, "energy", lambda x: x[:, 0, 0, 0].clone())
    run.config = dualmcmc.load_config("celeba64")
    tracemalloc.start()
    sample(run, 4_000, tmp_path / "a.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "a.npz").stat().st_size > 2 * 4_000 * 64 * 64 * 3
    assert peak_alive <= 2
    assert peak < 20e6  # of Python objects, such as the bytes that are written


def test_x_chain_lowers_the_energy(run, tmp_path):
    run = dualmcmc.load(run.file, "cpu", overrides=["sampling.steps=30"])
    numbers = sample(run, 64, tmp_path / "a.npz")
    assert numbers["energy_revised"] < numbers["energy_generator"]
    assert numbers["x_displacement_rms"] > 0
