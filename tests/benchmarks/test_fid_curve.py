import json
import shutil
from pathlib import Path

import pytest
import torch

import dualmcmc
import fid_curve
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trainer import train
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks import fid
from dualmcmc.tasks.evaluate import evaluate
from tests.conftest import assert_refused, tiny
from tests.networks import Tiny


@pytest.fixture(scope="module")
def features():
    return FeatureExtractor(Tiny(), 48, torch.device("cpu"), False, "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "measured"
    train(tiny("train.snapshot_every=64"), out, "cpu")
    return out


def test_every_snapshot_is_measured_with_its_own_weights(folder, features):
    result = fid_curve.measure(folder, 40, features, "cpu")
    assert [point["images"] for point in result["points"]] == [64, 128]
    for point, snapshot in zip(result["points"], RunFolder(folder).kept_snapshots(), strict=True):
        alone = evaluate(dualmcmc.load(snapshot, device="cpu"), ["fid"], 40, features=features)
        assert point["generator"] == pytest.approx(alone.generator[features.metric_name])
        assert point["ebm"] == pytest.approx(alone.ebm[features.metric_name])
    first, second = result["points"]
    assert first["generator"] != second["generator"]
    assert 0 < first["minutes"] < second["minutes"]


def test_settings_changed_on_resume_apply_from_there_on(features, tmp_path):
    settings = ("train.snapshot_every=64", "sampling.steps=null")
    train(tiny(*settings), tmp_path, "cpu", max_images=64)
    train(resumed_config(tmp_path, ["teaching.x_chain.step_size=3"]), tmp_path, "cpu", resume=True)
    first, second = fid_curve.measure(tmp_path, 40, features, "cpu")["points"]
    for point, snapshot in zip((first, second), RunFolder(tmp_path).kept_snapshots(), strict=True):
        alone = evaluate(dualmcmc.load(snapshot, device="cpu"), ["fid"], 40, features=features)
        assert point["ebm"] == pytest.approx(alone.ebm[features.metric_name])


def test_command(folder, features, run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(fid, "load_features", lambda **_: features)
    saved, plot = tmp_path / "a.json", tmp_path / "plot.png"
    answer = run_script("fid_curve.py", folder, "-n", 20, "--device", "cpu", "--json")
    assert answer.code == 0, answer.err
    saved.write_text(answer.out)
    answer = run_script("fid_curve.py", saved, saved, "--line", "9.26=paper", "--out", plot)
    assert answer.code == 0, answer.err
    assert plot.read_bytes()[:4] == b"\x89PNG"
    lines = answer.out.splitlines()
    assert len(lines) == 8
    assert lines[0].startswith("measured: ")
    assert "20 samples, x-chain of 3 steps" in lines[0]
    assert lines[3].split()[0] == "128"


def test_no_plot_without_minutes(folder, features, run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(fid, "load_features", lambda **_: features)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    RunFolder(copy).log.unlink()
    answer = run_script("fid_curve.py", copy, "-n", 20, "--device", "cpu", "--out", tmp_path / "plot.png")
    assert answer.code == 2
    assert "nothing to plot" in answer.err.splitlines()[-1]
    assert not (tmp_path / "plot.png").exists()


def test_bad_input(finished_run, features, run_script, monkeypatch, tmp_path):
    monkeypatch.setattr(fid, "load_features", lambda **_: features)
    other = tmp_path / "other.json"
    assert_refused(run_script("fid_curve.py", finished_run), "has no snapshots", "train.snapshot_every")
    assert_refused(run_script("fid_curve.py", tmp_path / "absent"), "does not exist")
    for points in ([{"minutes": 1}], [{"minutes": 1, "ebm": 3}]):
        other.write_text(json.dumps({"curves": [{"run": "a", "points": points}]}))
        assert_refused(run_script("fid_curve.py", other), "not the result of an earlier call")
    other.write_text("[" * 100_000)
    assert_refused(run_script("fid_curve.py", other), "not the result of an earlier call")
    other.write_text(json.dumps({"curves": []}))
    assert_refused(run_script("fid_curve.py", other), "not the result of an earlier call")
    assert_refused(run_script("fid_curve.py", other, "--line", "1=a"), "--line needs --out")
    assert_refused(run_script("fid_curve.py", tmp_path / "absent.json"), "cannot read")
    assert_refused(run_script("fid_curve.py", other, "--line", "paper"), "FID=LABEL")
