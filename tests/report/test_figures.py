import pytest
import torch

import dualmcmc
from dualmcmc import data
from dualmcmc.config import Chain
from dualmcmc.engine.journal import read
from dualmcmc.langevin import Trace
from dualmcmc.pictures import from_uint8
from dualmcmc.report import figures


def test_curves_show_the_log(finished_run):
    log = read(finished_run / "log.jsonl")
    assert figures.curves(log) != figures.curves([])
    assert figures.curves(log) == figures.curves(log)
    assert figures.curves([*log, {"kind": "train", "images": 999, "energy_gap": "nan"}])  # a diverged run's last line


def test_the_ends_of_the_chains_are_measured(finished_run, monkeypatch):
    run = dualmcmc.load(finished_run, device="cpu")
    shown = []
    monkeypatch.setattr(figures, "_profile", lambda values, title, label: shown.append(values) or "figure")
    images = data.load(run.config.data).test.tensor()
    _, _, ends = figures.z_chain(run, images)
    x = from_uint8(images[:64])
    assert ends["start"] == pytest.approx(float((run.reconstruct(x, steps=0) - x).square().mean()), rel=1e-4)
    assert float(shown[0][0].mean()) == pytest.approx(ends["start"])
    _, _, ends = figures.x_chain(run)
    assert float(shown[1][-1].mean()) == pytest.approx(ends["end"])
    assert len(shown[1]) == run.config.sampling_chain.steps + 1


def test_a_film_strip_has_a_column_a_frame():
    trace = Trace(every=2)
    dualmcmc.revise_x(lambda x: x.square().flatten(1).sum(1), torch.rand(7, 1, 64, 64), Chain(steps=5), None, trace)
    assert len(trace.states) == 4  # 0, 2, 4 and the last
    assert figures._strip([(state * 255).to(torch.uint8) for state in trace.states]).startswith("data:image/png")
