import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import dualmcmc
import trials
from dualmcmc import data
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.tasks.outliers import outliers
from dualmcmc.utils.errors import Diverged
from dualmcmc.utils.reporter import Reporter
from tests.conftest import assert_refused
from tests.networks import Tiny

TINY = (
    "nets.energy_width=4 nets.generator_width=4 nets.inference_width=4 teaching.latent_dim=4 teaching.x_chain.steps=3 "
    "teaching.z_chain.steps=2 train.images=128 train.batch=16 train.log_every=1 engine.threads=1"
)


def write(path: Path, lines: str, settings: str = TINY) -> Path:
    path.write_text(f"target: digits\nsettings: {settings}\ntrials:\n{lines}", encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "trials.yaml", "  same:\n  weak: teaching.x_chain.step_size=0.001\n")


def test_trials_run_in_processes_and_are_not_repeated(file, run_script, tmp_path):
    words = ("trials.py", file, "--out", tmp_path / "out", "-n", 0, "--jobs", 2, "--device", "cpu")
    answer = run_script(*words, "--json")
    assert answer.code == 0, answer.err
    first, second = json.loads(answer.out)["trials"]
    assert (first["trial"], second["trial"]) == ("same", "weak")
    assert (first["changes"], second["changes"]) == ("", "teaching.x_chain.step_size=0.001")
    assert first["iterations"] == second["iterations"] == 8
    log = [json.loads(line) for line in RunFolder(tmp_path / "out" / "weak").log.read_text().splitlines()]
    slopes = [line["energy_slope"] for line in log if line["kind"] == "train"]
    assert second["slope"] == pytest.approx([sum(slopes[:4]) / 4, sum(slopes) / 8])
    assert second["displacement"][1] < first["displacement"][1]
    assert "weak: finished" in answer.err
    again = run_script(*words)
    assert again.err == ""  # nothing was run
    assert [line.split(" | ")[2] for line in again.out.splitlines()[2:]] == [
        f"8 ({row['minutes']:.1f})" for row in (first, second)
    ]


def test_quality_is_that_of_the_run(file, run_script, monkeypatch, tmp_path):
    features = FeatureExtractor(Tiny(), 48, torch.device("cpu"), False, "tiny")
    monkeypatch.setattr("dualmcmc.tasks.evaluate.load_features", lambda **_: features)
    out = tmp_path / "out"
    for samples in (30, 40):  # measured again with another number
        words = ("trials.py", file, "--out", out, "--only", "same", "-n", samples, "--device", "cpu", "--json")
        (row,) = json.loads(run_script(*words).out)["trials"]
        found = evaluate(dualmcmc.load(out / "same", device="cpu"), ["fid"], samples, features=features)
        assert row["fid"] == [found.generator[features.metric_name], found.ebm[features.metric_name]]
        assert row["samples"] == samples
    run = dualmcmc.load(out / "same", device="cpu")
    images = data.load(run.trained_data)
    expected = outliers(run, images.test, {"train": images.train}, ["energy"]).numbers["train"]["energy"]["auroc"]
    assert row["memorisation"] == pytest.approx(expected)
    assert abs(expected - 0.5) > 1e-4  # the other way round it would be 1 - expected
    assert f" | {row['fid'][0]:.1f}, {row['fid'][1]:.1f} | " in trials.format_result({"trials": [row]})


def test_cut_off_trial_is_continued(file, run_script, tmp_path):
    trial, _ = trials.load_trials(file, tmp_path / "out")
    trials.trainer.train(trial.config, trial.root, "cpu", max_images=64, reporter=Reporter())
    words = ("trials.py", file, "--out", tmp_path / "out", "--only", "same", "-n", 0, "--device", "cpu", "--json")
    (row,) = json.loads(run_script(*words).out)["trials"]
    assert row["iterations"] == 8
    assert [line["kind"] for line in map(json.loads, RunFolder(trial.root).log.open())].count("resume") == 1


def test_diverged_trial_has_a_row(file, monkeypatch, tmp_path):
    (trial, _), train = trials.load_trials(file, tmp_path / "out"), trials.trainer.train

    def diverge(*args, **options):
        train(*args, **options)
        raise Diverged("the energy is not finite")

    monkeypatch.setattr(trials.trainer, "train", diverge)
    trials.run_trial(trial, 0, "cpu")
    result = trials.load_result(trial, 0)
    assert result["diverged"] == "the energy is not finite"
    assert "| same | none | diverged | – | " in trials.format_result({"trials": [result]})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_trials(number, tmp_path):
    file = write(tmp_path / "a.yaml", "  long: train.images=100000000\n")
    words = [file, "--out", tmp_path / "out", "-n", "0", "--device", "cpu"]
    process = subprocess.Popen([sys.executable, trials.__file__, *words], stderr=subprocess.PIPE, text=True)
    log = RunFolder(tmp_path / "out" / "long").log
    while not log.exists() or '"train"' not in log.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)  # to the parent alone
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert json.loads(log.read_text().splitlines()[-1])["kind"] == "stop"  # the run was saved


def test_failed_trial(run_script, tmp_path):
    """One trial cannot find its images; the other is finished all the same."""
    file = write(tmp_path / "a.yaml", "  good:\n  bad: data.source=folder data.path=absent\n")
    answer = run_script("trials.py", file, "--out", tmp_path / "out", "-n", 0, "--jobs", 2, "--device", "cpu")
    assert answer.code == 2
    assert "bad: failed" in answer.err
    assert answer.err.splitlines()[-1].startswith("error: 1 of 2 trials failed: see the logs in")
    assert "| good | none | 8 " in answer.out
    assert "does not exist" in (tmp_path / "out" / "bad.log").read_text()


def test_bad_input(file, run_script, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other.yaml"

    def refused(*texts, words=(), path=other):
        assert_refused(run_script("trials.py", path, "--out", out, *words), *texts)

    refused("cannot read", path=tmp_path / "absent.yaml")
    for text in ("", "[]", "trials: 3", "trials: {}"):
        other.write_text(text)
        refused("has no trials")
    other.write_text("trials: [")
    refused("not valid YAML")
    other.write_text("trials: {a: null}\nsteps: 3\n")
    refused("unknown key 'steps'")
    other.write_text("trials: {a: null}\n")
    refused("target must be")
    write(other, "  a: 3\n")
    refused("trial a", "KEY=VALUE")
    write(other, "  a: description='no end\n")
    refused("trial a", "No closing quotation")
    for name in ("../a", "3", "a b", "'-a'", "a.log", "a" * 101):
        write(other, f"  {name}:\n")
        refused("name of a trial")
    write(other, "  a: nets.kid=resnet\n")
    refused("trial a", "'nets.kind'")
    refused("unknown device", words=("--device", "tpu"), path=file)
    refused("has no trial 'absent'", words=("--only", "absent"), path=file)
    refused("at least 1", words=("--jobs", 0), path=file)
    assert not out.exists()


@pytest.mark.parametrize("change", ["teaching.x_chain.step_size=0.002", "data.source=folder data.path=other"])
def test_other_settings_are_refused(change, file, run_script, tmp_path):
    trial, _ = trials.load_trials(file, tmp_path / "out")
    trials.trainer.train(trial.config, trial.root, "cpu", max_images=16, reporter=Reporter())
    write(file, f"  same: {change}\n")
    assert_refused(run_script("trials.py", file, "--out", tmp_path / "out"), "trained with other settings", "rename")


def test_damaged_result_is_refused(file, run_script, tmp_path):
    good = {"trial": "same", "changes": "", "samples": 0, "iterations": 1, "minutes": 1.0}
    (tmp_path / "out" / "same").mkdir(parents=True)
    bad = [good | {name: value} for name, value in {"trial": "a", "samples": "x", "fid": [{}], "minutes": None}.items()]
    for content in ("{}", "[1]", "not JSON", "[" * 100_000, *map(json.dumps, bad)):
        (tmp_path / "out" / "same" / "trial.json").write_text(content)
        answer = run_script("trials.py", file, "--out", tmp_path / "out", "-n", 0, "--only", "same")
        assert_refused(answer, "not the result of trial same", "remove")
    (tmp_path / "out" / "same" / "trial.json").write_text(json.dumps(good))
    assert run_script("trials.py", file, "--out", tmp_path / "out", "-n", 0, "--only", "same").code == 0
