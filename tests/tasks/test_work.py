from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import dualmcmc
from dualmcmc.config import Data
from dualmcmc.data.store import MemoryStore
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks import chains
from dualmcmc.tasks.evaluate import evaluate, sample_features
from dualmcmc.tasks.inpaint import inpaint
from dualmcmc.tasks.outliers import outliers
from dualmcmc.tasks.reconstruct import compare_starts, reconstruct
from dualmcmc.tasks.sample import sample
from dualmcmc.tasks.work import CPU_WORK, default_count, reduction_note
from tests.networks import Tiny

STORE = MemoryStore(torch.randint(0, 256, (11, 1, 8, 8), dtype=torch.uint8))
FEATURES = FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum="tiny")
TASKS = {
    "reconstruct": lambda run, folder, progress: reconstruct(run, STORE, progress=progress),
    "compare_starts": lambda run, folder, progress: compare_starts(run, STORE, progress),
    "without noise": lambda run, folder, progress: compare_starts(run, STORE, progress, from_noise=False),
    "inpaint": lambda run, folder, progress: inpaint(run, STORE, "M20", progress=progress),
    "outliers": lambda run, folder, progress: outliers(run, STORE, {"a": STORE}, ["energy"], progress),
    "reconstruction score": lambda run, folder, progress: outliers(
        run, STORE, {"a": STORE}, ["energy", "reconstruction"], progress
    ),
    "sample": lambda run, folder, progress: sample(run, 11, folder / "a.png", progress),
    "features": lambda run, folder, progress: sample_features(run, 11, FEATURES, progress=progress),
    "trace_x": lambda run, folder, progress: chains.trace_x(run, 4, progress=progress),
    "trace_z": lambda run, folder, progress: chains.trace_z(run, STORE.first(4), progress=progress),
    "long chains": lambda run, folder, progress: chains.long_chains(run, 4, 9, progress),
}


@pytest.mark.parametrize("task", TASKS)
def test_progress_adds_up_and_advances_within_a_batch(finished_run, tmp_path, task):
    """Two batches; the last advance may only be a part of one."""
    run = dualmcmc.load(finished_run, "cpu", overrides=["sampling.batch=6", "teaching.z_chain.steps=4"])
    shown = []

    @contextmanager
    def progress(name, total, unit):
        counts = []
        shown.append((name, total, counts))
        yield counts.append

    TASKS[task](run, tmp_path, progress)
    assert shown
    for name, total, counts in shown:
        assert sum(counts) == pytest.approx(total), name
        if task != "outliers":  # by energy alone: one evaluation
            assert len(counts) > 2
    run.sample(2)  # nobody watches any more
    assert sum(shown[0][2]) == pytest.approx(shown[0][1])


def fake_run(device, size):
    return SimpleNamespace(device=torch.device(device), config=SimpleNamespace(data=Data(size=size, channels=1)))


def test_default_count():
    assert default_count(fake_run("cuda", 32), 10_000, 66) == 10_000
    assert default_count(fake_run("cpu", 8), 359, 71) == 359
    count = default_count(fake_run("cpu", 32), 10_000, 66)
    assert count * 66 * 32**2 <= CPU_WORK < (count + 1) * 66 * 32**2
    assert default_count(fake_run("cpu", 32), 5, 66) == 5
    assert default_count(fake_run("cpu", 1024), 10_000, 66) == 2


def test_reduction_note():
    assert reduction_note((64, 10_000, "images")) == ["using 64 of 10,000 images on this CPU; -n 10000 uses all"]
    both = reduction_note((80, 50_000, "samples"), (40, 10_000, "images"))
    assert both == ["using 80 of 50,000 samples, 40 of 10,000 images on this CPU; -n 50000 uses all"]
    assert reduction_note((80, 50_000, "samples"), (9, 9, "images")) == [
        "using 80 of 50,000 samples on this CPU; -n 50000 uses all"
    ]
    assert reduction_note((9, 9, "images")) == []


def test_evaluate_reconstructs_some(finished_run):
    run = dualmcmc.load(finished_run, "cpu", seed=3)
    result = evaluate(run, ["mse"], reconstructions=20)
    assert result.reconstructed == {"held-out images": 20, "training images": 20}
    assert result.reconstruction == evaluate(run, ["mse"], reconstructions=20).reconstruction
    everything = evaluate(run, ["mse"])
    assert everything.reconstructed == {"held-out images": 359, "training images": 359}
    assert everything.reconstruction != result.reconstruction
    assert everything.train_reconstruction != result.train_reconstruction
