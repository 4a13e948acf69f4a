import json
from pathlib import Path

import pytest
import torch

import dualmcmc
import trials
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.tasks.evaluate import evaluate
from dualmcmc.utils.errors import Diverged
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
    again = run_script(*words)
    assert again.err == ""  # nothing was run
    assert [line.split(" | ")[2] for line in again.out.splitlines()[2:]] == [
        f"8 ({row['minutes']:.1f})" for row in (first, second)
    ]


def test_quality_is_that_of_the_run(file, run_script, monkeypatch, tmp_path):
    features = FeatureExtractor(Tiny(), 48, torch.device("cpu"), False, "tiny")
    monkeypatch.setattr("dualmcmc.tasks.evaluate.load_features", lambda **_: features)
    out = tmp_path / "out"
    (row,) = json.loads(
        run_script("trials.py", file, "--out", out, "--only", "same", "-n", 40, "--device", "cpu", "--json").out
    )["trials"]
    expected = evaluate(dualmcmc.load(out / "same", device="cpu"), ["fid"], 40, features=features)
    assert (row["generator"], row["ebm"], row["samples"]) == (expected.generator, expected.ebm, 40)
    assert 0.2 < row["memorisation"] < 0.8
    assert f"{row['generator'][features.metric_name]:.1f} / " in trials.format_row(row)


def test_cut_off_trial_is_continued(file, run_script, tmp_path):
    (trial, _), root = trials.load_trials(file), tmp_path / "out" / "same"
    trials.trainer.train(trial.config, root, "cpu", max_images=64)
    words = ("trials.py", file, "--out", tmp_path / "out", "--only", "same", "-n", 0, "--device", "cpu", "--json")
    (row,) = json.loads(run_script(*words).out)["trials"]
    assert row["iterations"] == 8
    assert [line["kind"] for line in map(json.loads, RunFolder(root).log.open())].count("resume") == 1


def test_diverged_trial_has_a_row(file, monkeypatch, tmp_path):
    (trial, _), train = trials.load_trials(file), trials.trainer.train

    def diverge(*args, **options):
        train(*args, **options)
        raise Diverged("the energy is not finite")

    monkeypatch.setattr(trials.trainer, "train", diverge)
    result = trials.run_trial(trial, tmp_path / "same", 0, "cpu")
    assert result["diverged"] == "the energy is not finite"
    assert "| none | diverged | – |" in trials.format_row(trials.load_result(tmp_path / "same" / "trial.json"))


def test_failed_trial(run_script, tmp_path):
    """One trial cannot find its images; the other is finished all the same."""
    file = write(tmp_path / "a.yaml", "  good:\n  bad: data.source=folder data.path=absent\n")
    answer = run_script("trials.py", file, "--out", tmp_path / "out", "-n", 0, "--device", "cpu")
    assert answer.code == 2
    assert "bad: failed, see" in answer.err
    assert answer.err.splitlines()[-1] == "error: 1 of 2 trials are not finished: call again to continue."
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
    write(other, "  a: 3\n")
    refused("KEY=VALUE")
    for name in ("../a", "3", "a b", "'-a'"):
        write(other, f"  {name}:\n")
        refused("name of a trial")
    write(other, "  a: nets.kid=resnet\n")
    refused("'nets.kind'")
    refused("has no trial 'absent'", words=("--only", "absent"), path=file)
    refused("at least 1", words=("--jobs", 0), path=file)
    assert not out.exists()


def test_other_settings_are_refused(file, run_script, tmp_path):
    trial, _ = trials.load_trials(file)
    trials.trainer.train(trial.config, tmp_path / "out" / "same", "cpu", max_images=16)
    write(file, "  same: teaching.x_chain.step_size=0.002\n")
    assert_refused(run_script("trials.py", file, "--out", tmp_path / "out"), "trained with other settings", "rename")


def test_damaged_result_is_refused(file, run_script, tmp_path):
    for content in ("{}", "[1]", "not JSON"):
        for name in ("same", "weak"):
            (tmp_path / "out" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "out" / name / "trial.json").write_text(content)
        assert_refused(run_script("trials.py", file, "--out", tmp_path / "out"), "not the result of a trial", "remove")
