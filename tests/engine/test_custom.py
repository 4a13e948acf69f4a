"""Networks and data given in Python get the run that the command gives: the same weights, resumable, durable."""

import json
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dualmcmc
from dualmcmc import Trio, UserError, data
from dualmcmc.engine import plan
from dualmcmc.engine.executor import Executor
from dualmcmc.engine.log import read_log
from dualmcmc.engine.plan import ExecutionPlan, fit_plan
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trainer import train
from dualmcmc.nets import build
from dualmcmc.report.page import summarize
from tests.conftest import tiny
from tests.custom import BreaksCompiler, image_networks, plane_config, plane_networks, points
from tests.engine.test_trainer import Recorder, assert_equal, latest

CPU = torch.device("cpu")


def images():
    """The images of `digits`, a part of which `tiny` holds out."""
    return data.load(tiny("data.holdout=0").data).train.tensor()


def snapshot(folder):
    return load_file(RunFolder(folder).snapshot)


def test_copies_of_our_networks_train_bit_for_bit_as_by_the_command(call, tmp_path):
    config = tiny("seed=3", "nets.energy_slope=1")
    train(config, tmp_path / "plain", "cpu")
    train(config, tmp_path / "custom", "cpu", networks=build(config), data=images())
    assert_equal(latest(tmp_path / "plain"), latest(tmp_path / "custom"))
    assert_equal(snapshot(tmp_path / "plain"), snapshot(tmp_path / "custom"))
    stored = dualmcmc.load_config(str(tmp_path / "custom" / "config.yaml"))
    assert (stored.nets.kind, stored.data.source) == ("custom", "custom")
    assert stored.nets.energy_slope == 1
    assert stored.description == "digits with custom networks and data"
    assert "energy: dualmcmc.nets.energy.SimpleEnergy" in stored.nets.classes


@pytest.mark.parametrize("kind", ["images", "plane"])
def test_resume_is_exact(tmp_path, kind):
    """Tied weights, dropout, BatchNorm, spectral norm, buffers that are not saved; and samples that are not images.

    The stop saves where the other run does not, and saving evaluates the networks.
    """
    if kind == "images":
        config, build_networks, samples = tiny("train.images=96", "train.save_every=48"), image_networks, images()
    else:
        config, build_networks = plane_config("train.images=96", "train.save_every=48"), plane_networks
        samples = points(40)
    for name, stops in (("whole", [None]), ("parts", [32, None])):
        for number, stop in enumerate(stops):
            torch.manual_seed(number if name == "parts" and number else 0)  # another process: other initial weights
            networks = build_networks()
            torch.manual_seed(7 + number)
            given = None if number else config
            result = train(
                given, tmp_path / name, "cpu", resume=bool(number), max_images=stop, networks=networks, data=samples
            )
    assert (result.stop_reason, result.images) == ("finished", 96)
    assert_equal(latest(tmp_path / "whole"), latest(tmp_path / "parts"))


def test_globals_are_those_of_the_caller_afterwards(tmp_path):
    """Several runs in one process have networks of their own, and no_grad is no obstacle."""
    settings = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    networks = plane_networks()
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    networks = plane_networks()
    with torch.no_grad():
        config = plane_config("engine.threads=2", "train.images=32")
        train(config, tmp_path / "run", "cpu", networks=networks, data=points())
        assert not torch.is_grad_enabled()
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert (torch.get_num_threads(), torch.backends.cudnn.allow_tf32) == settings


def test_networks_are_trained_in_place(tmp_path):
    networks = plane_networks()
    before = networks.energy[0].weight.clone()
    train(plane_config("ema.half_life=0"), tmp_path / "run", "cpu", networks=networks, data=points())
    assert not torch.equal(networks.energy[0].weight, before)
    saved = snapshot(tmp_path / "run")
    assert_equal(saved, {name: saved[name] for name in networks.state_dict()})
    assert torch.equal(saved["energy.0.weight"], networks.energy[0].weight)


def test_report_without_an_inference_model(tmp_path):
    """The error is that after noise-free chains, not after those of the evaluation, which have noise."""
    config = plane_config("method=cooperative", "train.images=64")
    energy, generator, _ = plane_networks().children()
    networks, samples = Trio(energy, generator, None), points()
    train(config, tmp_path / "run", "cpu", networks=networks, data=samples, test_data=points(50, 1))
    given = {"networks": networks, "data": samples, "test_data": points(50, 1)}
    run = dualmcmc.load(tmp_path / "run", "cpu", **given)
    rebuilt = run.reconstruct(points(50, 1), rng=run.generator_for("z-chain"))
    numbers = summarize(run, run.load_data())
    assert numbers["mse_revised"] == pytest.approx(float((rebuilt - points(50, 1)).square().mean()), rel=1e-4)
    assert "mse_inference" not in numbers


def test_samples_that_are_not_images(tmp_path):
    folder = tmp_path / "run"
    train(plane_config(), folder, "cpu", networks=plane_networks(), data=points(), test_data=points(50, 1))
    assert not list(RunFolder(folder).samples.iterdir())  # no pictures
    run = dualmcmc.load(folder, "cpu", networks=plane_networks(), data=points(), test_data=points(50, 1))
    assert "custom networks: 2 samples" in repr(run)
    assert run.sample(5).shape == (5, 2)
    assert run.energy(points(7)).shape == (7,)
    assert run.reconstruct(points(7)).shape == (7, 2)
    evaluation = dualmcmc.evaluate(run)
    assert set(evaluation.reconstruction["inference"]) == {"mse"}
    assert evaluation.reconstructed["held-out images"] == 50
    detection = dualmcmc.outliers(run, points(20), {"far": points(20) + 30}, ["energy", "typicality"])
    assert set(detection.numbers["far"]) == {"energy", "typicality"}
    path, numbers = dualmcmc.write_report(folder, "cpu", networks=plane_networks(), data=points())
    assert numbers["mse_revised"] > 0
    assert "samples of shape 2" in path.read_text()
    for refused in (
        lambda: dualmcmc.evaluate(run, "fid"),
        lambda: dualmcmc.inpaint(run, points(5), "M20"),
        lambda: run.picture(points(4)),
    ):
        with pytest.raises(UserError, match=r"is for images, and this run was trained on samples of shape \(2,\)"):
            refused()
    for wrong in (torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int64), "text"):
        with pytest.raises(UserError, match="samples"):
            run.energy(wrong)


def test_nothing_is_imported_from_the_run(tmp_path):
    """Without the networks a run says which they were; a name in its settings is no more than a note."""
    folder = tmp_path / "run"
    train(plane_config(), folder, "cpu", networks=plane_networks(), data=points())
    with pytest.raises(UserError, match=r"tests\.custom\.PlaneInference.*pass them"):
        dualmcmc.load(folder)
    with pytest.raises(UserError, match=r"nets\.kind=custom: pass the networks"):
        train(None, folder, "cpu", resume=True, data=points())
    with pytest.raises(UserError, match=r"networks\.energy failed on inputs of shape \(2, 2\)"):
        dualmcmc.load(folder, networks=image_networks())
    with pytest.raises(UserError, match=r"data\.source=custom: pass the data in Python"):
        train(None, folder, "cpu", resume=True, networks=plane_networks())
    with pytest.raises(UserError, match="must resume on the same data"):
        train(None, folder, "cpu", resume=True, networks=plane_networks(), data=points(seed=5))
    with pytest.raises(UserError, match=r"shape \(2,\); those in data have shape \(3,\)"):
        dualmcmc.load(folder, networks=plane_networks(), data=torch.zeros(5, 3))
    run = dualmcmc.load(folder, "cpu", networks=plane_networks())
    with pytest.raises(UserError, match=r"data\.source=custom: pass the data in Python"):
        dualmcmc.evaluate(run)


def test_networks_by_a_function(tmp_path):
    """They start from the run's seed, and need no copy."""
    for name in ("first", "second"):
        train(plane_config(), tmp_path / name, "cpu", networks=plane_networks, data=points())
        torch.rand(1)
    assert_equal(snapshot(tmp_path / "first"), snapshot(tmp_path / "second"))
    run = dualmcmc.load(tmp_path / "first", "cpu", networks=plane_networks)
    assert run.sample(2).shape == (2, 2)


class Masked(torch.nn.Module):
    """An energy with a mask of -inf, and one that keeps what it computed."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x):
        self.last = self.head(x)
        return -(self.last + self.mask).logsumexp(1)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_masks_of_infinity_and_kept_activations(tmp_path, quick_compiler, mode):
    def networks():
        return Trio(**dict(plane_networks().named_children()) | {"energy": Masked()})

    config = plane_config("train.images=32", f"engine.mode={mode}", "ema.energy=true", "ema.half_life=100")
    result = train(config, tmp_path / "run", "cpu", networks=networks(), data=points())
    assert result.engine == f"{mode}, float32"
    train(None, tmp_path / "run", "cpu", resume=True, networks=networks(), data=points())
    run = dualmcmc.load(tmp_path / "run", "cpu", networks=networks())
    assert run.energy(points(3)).isfinite().all()
    assert run.export(str(tmp_path / "small.safetensors"))["relative_change"] < 1e-3


class WithLock(torch.nn.Linear):
    """Cannot be copied."""

    def __init__(self):
        super().__init__(2, 1)
        self.lock = threading.Lock()


def test_networks_that_cannot_be_copied(tmp_path):
    def networks():
        return Trio(**dict(plane_networks().named_children()) | {"energy": WithLock()})

    folder = tmp_path / "run"
    train(plane_config("train.images=32"), folder, "cpu", networks=networks(), data=points())
    with pytest.raises(UserError, match=r"networks\.energy cannot be copied"):
        dualmcmc.load(folder, "cpu", networks=networks())
    assert dualmcmc.load(folder, "cpu", networks=networks).energy(points(3)).shape == (3,)


def test_callbacks_leave_the_modes_of_the_networks(tmp_path):
    networks, modes = image_networks(), []

    def evaluate(stats):
        modes.append(networks.generator.training)
        networks.eval()

    train(tiny("train.images=96"), tmp_path / "run", "cpu", networks=networks, data=images(), on_log=evaluate)
    assert len(modes) > 1
    assert all(modes)


def test_observed_values_of_vectors(tmp_path):
    folder = tmp_path / "run"
    train(plane_config("train.images=32"), folder, "cpu", networks=plane_networks, data=points())
    run, x = dualmcmc.load(folder, "cpu", networks=plane_networks), points(3)
    observed = torch.tensor([[True, False]])
    revised = run.revise_x(x, observed=observed)
    assert torch.equal(revised[:, 0], x[:, 0])
    assert not torch.equal(revised[:, 1], x[:, 1])
    assert run.revise_z(run.prior(3), x, observed=observed).shape == (3, 3)
    for wrong in (observed.float(), torch.ones(3, 5, dtype=torch.bool), observed[None]):
        with pytest.raises(UserError, match="observed must be a boolean mask that broadcasts to"):
            run.revise_x(x, observed=wrong)


def test_bad_arguments(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError, match="config is None"):
        train(None, out)
    with pytest.raises(UserError, match="test_data is given without data"):
        train("digits", out, test_data=points())
    with pytest.raises(UserError, match="max_images must be greater than 0, not -5"):
        train("digits", out, max_images=-5)
    with pytest.raises(UserError, match=r"data\.source=custom: pass the data in Python"):
        train("vectors", out, networks=plane_networks)
    with pytest.raises(UserError, match=r"data\.shape may have 8 dimensions and 67,108,864 values at most"):
        plane_config("data.source=custom", "data.shape=[1000000000,3]")
    with pytest.raises(UserError, match="need square images of a supported size"):
        train(tiny(), out, "cpu", data=points())
    with pytest.raises(UserError, match=r"networks\.energy failed on inputs of shape \(2, 7\)"):
        train(plane_config(), out, "cpu", networks=plane_networks(), data=torch.zeros(50, 7))
    with pytest.raises(UserError, match="energy_consistency is for images"):
        config = plane_config("teaching.energy_consistency=1")
        train(config, out, "cpu", networks=plane_networks(), data=points())
    assert not out.exists()


def test_other_settings_cannot_be_resumed(tmp_path):
    config, out = plane_config("train.images=32"), tmp_path / "run"
    train(config, out, "cpu", networks=plane_networks(), data=points())
    with pytest.raises(UserError, match=r"cannot change seed from 0 to 1"):
        train(plane_config("seed=1"), out, "cpu", resume=True, networks=plane_networks(), data=points())


def test_callbacks(tmp_path):
    logged, saved = [], []
    train(
        plane_config("train.images=64", "train.save_every=32"), tmp_path / "run", "cpu",
        networks=plane_networks(), data=points(), on_log=logged.append, on_save=lambda *facts: saved.append(facts),
    )  # fmt: skip
    entries = read_log(RunFolder(tmp_path / "run").log)
    assert [stats["images"] for stats in logged] == [e["images"] for e in entries if e["kind"] == "train"]
    assert {"energy_gap", "reconstruction_mse", "iterations_per_second"} <= logged[-1].keys()
    assert saved == [(images, RunFolder(tmp_path / "run").snapshot) for images in (0, 32, 64)]


def test_exception_in_a_callback_ends_the_run(tmp_path):
    def stop(images, snapshot):
        if images >= 32:
            raise RuntimeError("enough")

    config, out = plane_config("train.images=96", "train.save_every=32"), tmp_path / "run"
    with pytest.raises(RuntimeError, match="enough"):
        train(config, out, "cpu", networks=plane_networks(), data=points(), on_save=stop)
    result = train(None, out, "cpu", resume=True, networks=plane_networks(), data=points())
    assert (result.images, result.stop_reason) == (96, "finished")


def test_stopped_by_a_signal(tmp_path):
    stop = Recorder(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = train(plane_config(), tmp_path / "run", "cpu", networks=plane_networks(), data=points(), reporter=stop)
    assert (result.stop_reason, result.iterations) == ("SIGINT", 3)
    assert RunFolder(tmp_path / "run").latest_state().stem == f"{3 * 16:012d}"


def test_compiled(tmp_path, quick_compiler):
    """Layers of every kind run compiled and give the same, up to rounding."""
    for mode in ("eager", "compiled"):
        torch.manual_seed(0)
        networks = image_networks()
        networks.generator.drop.p = 0.0  # compiled dropout draws other numbers
        config = tiny("train.images=48", f"engine.mode={mode}")
        result = train(config, tmp_path / mode, "cpu", networks=networks, data=images())
        assert result.engine == f"{mode}, float32"
    eager, compiled = snapshot(tmp_path / "eager"), snapshot(tmp_path / "compiled")
    assert all(torch.allclose(value, compiled[name], atol=1e-4) for name, value in eager.items())


def test_networks_that_cannot_be_compiled_run_eagerly(tmp_path, quick_compiler):
    parts = dict(image_networks().named_children())
    networks, messages = Trio(**parts | {"energy": BreaksCompiler()}), Recorder()
    config = tiny("train.images=48", "engine.mode=compiled")
    result = train(config, tmp_path / "run", "cpu", networks=networks, data=images(), reporter=messages)
    assert result.engine == "eager, float32"
    assert len([text for text in messages.messages if "running eagerly: compilation failed" in text]) == 1
    notes = [json.dumps(entry) for entry in read_log(RunFolder(tmp_path / "run").log) if entry["kind"] == "note"]
    assert "compilation failed" in notes[0]


class Halves(torch.nn.Module):
    """An energy whose activations must be float32."""

    def __init__(self):
        super().__init__()
        self.conv, self.weight = torch.nn.Conv2d(1, 8, 3), torch.nn.Parameter(torch.ones(8 * 36))

    def forward(self, x):
        return self.conv(x).flatten(1) @ self.weight


def test_precision_that_networks_do_not_support():
    parts = dict(image_networks().named_children())
    config = tiny("engine.precision=bfloat16")
    requested = ExecutionPlan(False, "bfloat16", CPU)
    networks = Trio(**parts | {"energy": Halves()})
    found = fit_plan(requested, networks, config)
    assert found.precision == "float32"
    assert "convolutions in float32: networks.energy fails with convolutions in bfloat16" in found.notes[0]
    assert fit_plan(requested, image_networks(), config) == requested
    assert fit_plan(ExecutionPlan(False, "float32", CPU), networks, tiny()).notes == ()


class Rebound(torch.nn.Module):
    """An energy that an executor's copy of its layers would not follow: it uses a tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 1)
        self.weight = [self.head.weight]

    def forward(self, x):
        return x.flatten(1) @ self.weight[0].mT


def test_networks_that_are_no_functions_of_their_parameters_run_as_they_are():
    networks = Trio(**dict(image_networks().named_children()) | {"energy": Rebound()})
    found = fit_plan(ExecutionPlan(True, "float32", CPU), networks, tiny())
    assert not found.compiled
    assert "running eagerly: networks.energy" in found.notes[0]
    with pytest.raises(UserError, match=r"engine\.micro_batch does not support these networks"):
        fit_plan(ExecutionPlan(False, "float32", CPU), networks, tiny("engine.micro_batch=2"))


def test_micro_batches(tmp_path):
    config = tiny("train.images=32", "engine.micro_batch=4")
    networks = build(config)
    train(config, tmp_path / "plain", "cpu")
    train(config, tmp_path / "custom", "cpu", networks=networks, data=images())
    assert_equal(snapshot(tmp_path / "plain"), snapshot(tmp_path / "custom"))
    assert isinstance(plan.build_executors(networks, config, ExecutionPlan(False, "float32", CPU)).energy, Executor)
