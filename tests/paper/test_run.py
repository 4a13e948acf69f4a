"""`dualmcmc paper`: runs are trained, shared, continued and measured once; the tables contain what was measured."""

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dualmcmc
from dualmcmc import config_io
from dualmcmc.config import NETWORKS
from dualmcmc.engine import trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.step import TrainStep
from dualmcmc.metrics.inception import FeatureExtractor
from dualmcmc.paper import measure, runs
from dualmcmc.paper import run as paper_run
from dualmcmc.paper.experiments import EXPERIMENTS, VARIANTS, WIDTHS
from dualmcmc.paper.measure import MEASURES, Measurement
from dualmcmc.paper.runs import SCALES, plan_runs
from dualmcmc.tasks.evaluate import Evaluation
from dualmcmc.utils.progress import no_progress
from dualmcmc.utils.reporter import Reporter
from tests.conftest import assert_refused
from tests.networks import Tiny

QUICK = [
    "train.images=64",
    "train.batch=16",
    "train.log_every=1",
    "teaching.x_chain.steps=2",
    "teaching.buffer_size=20",
]


def rows(path):
    return {row[""]: row for row in csv.DictReader(path.open())}


def test_all_experiments(tmp_path, call):
    """Of the scale smoke; a second call trains and measures nothing."""
    answer = call("paper", "run", "all", *QUICK, "--out", tmp_path, "--device", "cpu", "--json")
    assert answer.code == 0, answer
    assert set(answer.json) == set(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        found = rows(tmp_path / f"{name}-smoke.csv")
        assert list(found) == [row.label for row in experiment.rows]
        for suffix in ("md", "html", "json"):
            assert (tmp_path / f"{name}-smoke.{suffix}").exists()
        for row in experiment.rows:
            for column, figure in row.paper.items():
                assert found[row.label][f"{column}, paper"] == figure
            assert (found[row.label]["trained"] == "quoted") == (row.variant is None)
    title = answer.json["table-mse"]["title"]
    assert title == "Reconstruction error: the paper on CIFAR-10, here on digits"
    kz = rows(tmp_path / "table-kz-smoke.csv")
    assert all(float(row["MSE, here"]) > 0 and float(row["time (s), here"]) > 0 for row in kz.values())
    assert {row["FID, here"] for row in kz.values()} == {"–"}  # pixel distances are not FID
    assert all(float(row["Fréchet distance of pixels, here"]) > 0 for row in kz.values())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert call("paper", "run", "table-kz", *QUICK, "--out", tmp_path, "--device", "cpu").code == 0
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert [path for path in changed if path.name != ".lock"] == []
    assert rows(tmp_path / "table-kz-smoke.csv") == kz


def test_stopped_experiment_continues(tmp_path, monkeypatch):
    real, calls = trainer.train, []

    def stopped(*arguments, **options):
        calls.append(arguments[1].name)
        result = real(*arguments, **options | ({"max_images": 32} if len(calls) == 2 else {}))
        return replace(result, stop_reason="SIGTERM") if len(calls) == 2 else result

    monkeypatch.setattr(trainer, "train", stopped)
    with pytest.raises(dualmcmc.UserError, match=r"noise-kz30 was stopped \(SIGTERM\): the same command continues it"):
        paper_run.run_experiment("table-kz", "smoke", tmp_path, "cpu", QUICK)
    paper_run.run_experiment("table-kz", "smoke", tmp_path, "cpu", QUICK)
    assert [name.removeprefix("smoke-digits-") for name in calls] == [
        "noise-kz10", "noise-kz30", "noise-kz30", "dual-mcmc", "kz30",
    ]  # fmt: skip
    log = read_log(RunFolder(tmp_path / "runs" / "smoke-digits-noise-kz30").log)
    assert [entry["kind"] for entry in log if entry["kind"] in ("start", "resume")] == ["start", "resume"]


def test_runs():
    """Equal settings are one run; the budget is shared evenly; widths are relative to the preset's."""
    for experiment in EXPERIMENTS.values():
        assert set(experiment.variants) <= set(VARIANTS)
        assert set(experiment.measures) <= set(MEASURES)
    by_scale = {name: plan_runs(EXPERIMENTS["table-mse"], name, Path("paper"), []) for name in SCALES}
    for name, planned in by_scale.items():
        assert [run.variant for run in planned] == EXPERIMENTS["table-mse"].variants
        assert all(run.config.method in NETWORKS for run in planned)
        assert (planned[0].minutes is None) == (name != "short")
    assert sum(run.minutes + runs.MINUTES_TO_MEASURE for run in by_scale["short"]) == pytest.approx(25)
    assert by_scale["full"][-1].folder.name == "full-cifar10-resnet-dual-mcmc"  # kz10 is the preset
    half, same, double = (
        run.config.nets.energy_width for run in plan_runs(EXPERIMENTS["table-nef"], "full", Path("paper"), [])
    )
    assert (half, same, double) == (256, 512, 1024)
    assert set(WIDTHS) == set(EXPERIMENTS["table-nef"].variants)
    simple = plan_runs(EXPERIMENTS["table-simple"], "full", Path("paper"), ["seed=3"])
    assert {run.config.preset for run in simple} == {"cifar10-simple-authors"}
    assert {run.config.seed for run in simple} == {3}


def test_budget_of_a_run(tmp_path, monkeypatch):
    """Its minutes are of training alone, over all sessions; a run that has had them is not touched again."""
    scale = replace(SCALES["smoke"], minutes=4.0, settings=(*SCALES["smoke"].settings, "train.images=100000000"))
    monkeypatch.setitem(SCALES, "smoke", scale)
    monkeypatch.setattr(runs, "MINUTES_TO_MEASURE", 0.98)
    (run, *_) = plan_runs(EXPERIMENTS["table-kx"], "smoke", tmp_path, QUICK[1:])
    assert run.minutes == pytest.approx(0.02)
    assert run.folder.name == "smoke-digits-0.02min-kx10"
    limited, compiling = trainer.train, 2.0

    def prepare(self, *arguments):
        time.sleep(compiling)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "prepare", prepare)
        patch.setattr(trainer, "train", lambda *a, **options: limited(*a, **options, max_images=64))
        with pytest.raises(runs.Stopped):
            runs.train(run, "cpu", Reporter(), lambda text: None)
        stopped = run.trained_minutes
        patch.setattr(trainer, "train", limited)
        assert runs.train(run, "cpu", Reporter(), lambda text: None) is None
    assert 0 < stopped < 0.02 <= run.trained_minutes < 0.03
    before = run.trained_minutes
    said = []
    runs.train(run, "cpu", Reporter(), said.append)
    assert (run.trained_minutes, said) == (before, [])


def test_equal_budgets():
    """A run is shared only by experiments that give it the same minutes."""
    folders = {}
    for experiment in EXPERIMENTS.values():
        for run in plan_runs(experiment, "short", Path("paper"), []):
            assert folders.setdefault(run.folder, run.minutes) == run.minutes
            assert run.minutes > 1


def test_settings_that_changed(tmp_path):
    """Settings of training are refused; those of sampling are measured again, with the same weights."""

    def measured(*settings):
        return paper_run.run_experiment("table-nef", "smoke", tmp_path, "cpu", [*QUICK, *settings])

    said = []
    first = measured()
    for setting in ("optim.energy.lr=0.5", "teaching.generator_data_weight=3", "train.batch=8", "seed=2"):
        with pytest.raises(dualmcmc.UserError, match="choose another --out"):
            measured(setting)
    for setting in ("method=vae", "teaching.z_start=prior"):
        with pytest.raises(dualmcmc.UserError, match="the experiments choose"):
            measured(setting)
    second = measured("sampling.steps=0")
    assert "sampling.steps=0" in second.notes[-1]
    assert [row[-2] for row in first.rows] != [row[-2] for row in second.rows]
    again = paper_run.run_experiment("table-nef", "smoke", tmp_path, "cpu", QUICK, notify=said.append)
    assert again == first
    assert said == []


def test_runs_that_differ_in_sampling_are_trained_once():
    full = {run.variant: run for run in plan_runs(EXPERIMENTS["table-kx"], "full", Path("paper"), [])}
    assert full["kx30"].folder.name == "full-cifar10-resnet-dual-mcmc"
    assert full["kx30"].config.sampling_chain == full["kx30"].config.teaching.x_chain


def test_diverged_run(tmp_path):
    """It is measured at its last valid state, and not trained again."""
    said = []
    for _ in range(2):
        table = paper_run.run_experiment(
            "table-simple", "smoke", tmp_path, "cpu", [*QUICK, "guard.max_z_displacement=1e-6"], notify=said.append
        )
        facts = {row[0]: row[-1] for row in table.rows}
        assert facts["dual-MCMC teaching"].endswith("seed 0, diverged at image 16, measured at image 0")
        assert "diverged" not in facts["Divergence triangle"]
    assert len([text for text in said if text.startswith("training smoke-digits-dual-mcmc")]) == 1


def test_exit_code_of_a_stopped_run(tmp_path, call, monkeypatch):
    real = trainer.train
    monkeypatch.setattr(trainer, "train", lambda *a, **k: replace(real(*a, **k), stop_reason="SIGINT"))
    answer = call("paper", "run", "table-kx", *QUICK, "--out", tmp_path, "--device", "cpu")
    assert answer.code == 130
    assert "kx10 was stopped (SIGINT): the same command continues it" in answer.err


def test_damaged_state(tmp_path):
    """The state before it is continued."""
    (run, *_) = plan_runs(EXPERIMENTS["table-kx"], "smoke", tmp_path, QUICK)
    runs.train(run, "cpu", Reporter(), lambda text: None)
    assert run.finished
    state = RunFolder(run.folder).latest_state()
    state.write_bytes(state.read_bytes()[:-100])
    runs.train(run, "cpu", Reporter(), lambda text: None)
    assert RunFolder(run.folder).latest_state() == state
    assert state.with_suffix(".damaged").exists()


def test_errors_are_those_of_the_method(tmp_path):
    """Inference for autoencoders; a long z-chain for methods without; after the chain of training for ours."""
    planned = plan_runs(EXPERIMENTS["table-mse"], "smoke", tmp_path, [*QUICK, "train.images=16"])
    measurement = Measurement(SCALES["smoke"], None, no_progress)
    for run in planned:
        if run.variant in ("vae", "cooperative", "kz10"):
            runs.train(run, "cpu", Reporter(), lambda text: None)
            numbers = measurement.errors(dualmcmc.load(run.folder, "cpu"), run)
            inferred, revised = numbers["MSE, inference"], numbers["MSE, inference + z-chain"]
            if run.variant == "cooperative":
                assert inferred is revised is None
                assert numbers["MSE"] > 0
            else:
                assert numbers["MSE"] == (inferred if run.variant == "vae" else revised)
                assert inferred != revised


def test_fid_and_outliers(tmp_path):
    """With FID's network, and with the other datasets; what is missing is named and tried again."""
    (run,) = (
        run for run in plan_runs(EXPERIMENTS["table-ood"], "smoke", tmp_path, QUICK) if run.variant == "dual-mcmc"
    )
    runs.train(run, "cpu", Reporter(), lambda text: None)
    features = FeatureExtractor(Tiny(), 48, "cpu", standard=False, checksum="tiny")
    measurement = Measurement(SCALES["smoke"], features, no_progress)
    trained = dualmcmc.load(run.folder, "cpu")
    numbers = measurement.samples(trained, run)
    assert numbers["FID"] > 0
    assert numbers["FID, generator"] > 0
    assert numbers["IS"] is None
    assert measurement.outliers(trained, run) == {}
    assert not measurement.complete
    assert any("SVHN: its images are missing ('dualmcmc data fetch svhn')" in note for note in measurement.notes)


def test_prediction(tmp_path):
    (run, *_) = plan_runs(EXPERIMENTS["table-kx"], "smoke", tmp_path, QUICK)
    said = []
    paper_run.announce([run], "cpu", said.append)
    assert said[0].startswith("smoke-digits-kx10: 4 iterations of ")
    assert "hours" in said[1]
    assert not run.folder.exists()


def test_bad_input(call, tmp_path):
    assert_refused(call("paper", "run", "table-kk"), "unknown experiment 'table-kk'", "table-kz")
    assert_refused(call("paper", "run", "table1", "--scale", "shorts"), "--scale shorts", "short")
    if not torch.cuda.is_available():
        assert_refused(call("paper", "run", "table-kz", "--scale", "full", "--out", tmp_path), "needs a GPU", "smoke")


def test_samples_of_methods_without_x_chains(tmp_path, monkeypatch):
    """Are the generator's; both are further columns."""
    monkeypatch.setattr(measure, "evaluate", lambda *a, **k: Evaluation(generator={"fid": 1.0}, ebm={"fid": 2.0}))
    features = FeatureExtractor(Tiny(), 48, "cpu", standard=True, checksum="tiny")
    measurement = Measurement(SCALES["smoke"], features, no_progress)
    found = {}
    for run in plan_runs(EXPERIMENTS["table-simple"], "smoke", tmp_path, QUICK):
        runs.train(run, "cpu", Reporter(), lambda text: None)
        found[run.variant] = measurement.samples(dualmcmc.load(run.folder, "cpu"), run)
    assert {variant: numbers["FID"] for variant, numbers in found.items()} == {
        "cooperative": 2.0, "triangle": 1.0, "no-mcmc": 1.0, "dual-mcmc": 2.0,
    }  # fmt: skip
    assert all(numbers["FID, generator"] == 1.0 for numbers in found.values())
    assert all(numbers["FID, after the x-chain"] == 2.0 for numbers in found.values())


def test_list(call):
    answer = call("paper", "list")
    assert answer.code == 0
    assert all(name in answer.out for name in EXPERIMENTS)
    assert set(call("paper", "list", "--json").json) == set(EXPERIMENTS)


def test_presets_exist():
    for scale in SCALES.values():
        for preset in (scale.preset, scale.simple_preset):
            config_io.load_config(preset, list(scale.settings))
