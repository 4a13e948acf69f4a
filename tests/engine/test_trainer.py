"""Runs are durable: they resume exactly, stop cleanly, and keep the last valid state when they diverge."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import dualmcmc
from dualmcmc import config_io, langevin, rng
from dualmcmc.data import pack
from dualmcmc.engine import checkpoint, guard, loop, trainer
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.step import TrainStep
from dualmcmc.engine.trainer import train
from dualmcmc.utils.errors import Diverged, UserError
from dualmcmc.utils.files import digest
from dualmcmc.utils.reporter import Reporter
from tests.conftest import TINY, tiny
from tests.data.makers import image_folder

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
BATCH = 16  # of `tiny`, which trains on 128 images and saves at 64 and 128


class Recorder(Reporter):
    """Collects messages, and calls a function after a given iteration."""

    def __init__(self, at=0, action=None):
        self.messages, self._at, self._action = [], at, action

    def message(self, text):
        self.messages.append(text)

    def advance(self, images, iteration):
        if iteration == self._at:
            self._action()


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """Settings for a dataset of 40 images: three batches cross an epoch."""
    path = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(path, np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8))
    return "data.source=folder", f"data.path={path}"


def resume(folder, *overrides, device=CPU, **arguments):
    return train(resumed_config(folder, list(overrides)), folder, device, resume=True, **arguments)


def latest(folder):
    """Everything in the newest state of a run."""
    return load_file(RunFolder(folder).latest_state())


def saved_at(folder):
    return [int(path.stem) for path in RunFolder(folder).saved_states()]


def entries(folder, kind):
    return [entry for entry in read_log(RunFolder(folder).log) if entry["kind"] == kind]


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_snapshots_are_kept_if_requested(tmp_path, few_images):
    train(tiny(*few_images, "train.images=96", "train.snapshot_every=40"), tmp_path / "run", "cpu", max_images=64)
    folder = RunFolder(tmp_path / "run")
    folder.snapshots.joinpath(".x.1.tmp").touch()  # of a process killed while writing
    assert [int(path.stem) for path in folder.kept_snapshots()] == [48]
    resume(tmp_path / "run", device="cpu")
    assert [path.name for path in sorted(folder.snapshots.iterdir())] == [f"{n:012d}.safetensors" for n in (48, 80, 96)]
    assert len(folder.saved_states()) <= 2
    assert_equal(load_file(folder.kept_snapshots()[-1]), load_file(folder.snapshot))
    train(tiny(*few_images), tmp_path / "other", "cpu")
    assert not RunFolder(tmp_path / "other").snapshots.exists()


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        ("nets.kind=resnet", "ema.energy=true", "data.flip=true"),
        ("nets.kind=style", "nets.energy_slope=1"),
        ("ema.half_life=0", "teaching.second_x_chain=true", "teaching.energy_consistency=2"),
        ("teaching.energy_augment=0.5", "teaching.energy_augment_ramp=160"),
    ],
)
def test_resume_is_exact(tmp_path, few_images, overrides, device):
    """2N iterations equal N, stop, resume, N, bit for bit: weights, moments, averages and random states.

    The batches cross epochs, and the two runs draw sample grids at different times.
    """
    settings = (*few_images, *overrides, "train.images=96", "train.save_every=48")
    train(tiny(*settings, "train.sample_every=1000"), tmp_path / "whole", device)
    train(tiny(*settings, "train.sample_every=16"), tmp_path / "parts", device, max_images=48)
    torch.manual_seed(999)  # another process starts with other global generators
    result = resume(tmp_path / "parts", device=device)
    assert (result.stop_reason, result.images, result.iterations) == ("finished", 96, 6)
    assert_equal(latest(tmp_path / "whole"), latest(tmp_path / "parts"))
    assert_equal(*(load_file(RunFolder(tmp_path / name).snapshot) for name in ("whole", "parts")))
    first = load_file(RunFolder(tmp_path / "whole").saved_states()[0])
    assert any(not torch.equal(value, first[name]) for name, value in latest(tmp_path / "whole").items())


def weights(folder, state=0):
    """The networks and averages of one saved state."""
    tensors = load_file(RunFolder(folder).saved_states()[state])
    return {name: value for name, value in tensors.items() if name.startswith(("nets.", "ema."))}


@pytest.mark.parametrize("overrides", [(), ("nets.energy_slope=null", "ema.half_life=0")])
def test_init_starts_from_the_weights_of_a_run(tmp_path, monkeypatch, overrides):
    train(tiny(*overrides, "train.images=32"), tmp_path / "first", CPU)
    monkeypatch.chdir(tmp_path)
    reporter, short = Recorder(), ("seed=5", "train.images=32", "train.keep=9")
    train(tiny(*overrides, *short, "train.init=first"), tmp_path / "second", CPU, reporter=reporter)
    source = RunFolder(tmp_path / "first").snapshot
    snapshot, started = load_file(source), weights(tmp_path / "second")
    for name, value in started.items():
        network = name.removeprefix("nets.").removeprefix("ema.")
        assert torch.equal(value, snapshot[network]), name
    assert any(not torch.equal(value, started[name]) for name, value in weights(tmp_path / "second", -1).items())
    (start,) = entries(tmp_path / "second", "start")
    assert start["init"] == {"file": str(source), "sha256": digest(source, "sha256").hexdigest(), "images": 32}
    assert any(str(source) in text and "32 images" in text for text in reporter.messages)
    assert config_io.load_config(str(RunFolder(tmp_path / "second").config)).train.init == str(tmp_path / "first")


def test_init_is_needed_only_once(tmp_path, monkeypatch):
    train(tiny("train.images=16"), tmp_path / "first", CPU)
    train(tiny(f"train.init={tmp_path / 'first'}"), tmp_path / "second", CPU, max_images=64)
    shutil.rmtree(tmp_path / "first")
    assert resume(tmp_path / "second").stop_reason == "finished"
    with pytest.raises(UserError, match=r"cannot change train\.init"):
        resumed_config(tmp_path / "second", ["train.init=null"])
    monkeypatch.chdir(tmp_path)
    assert resumed_config(tmp_path / "second", ["train.init=first"]).train.init == str(tmp_path / "first")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nets.energy_width=6", "does not match the networks of the new run"),
        ("nets.kind=resnet", "does not match the networks of the new run"),
        ("nets.energy_slope=null", "does not match the networks of the new run"),
        ("train.init=~nobody-here/x", "no such home folder"),
        ("train.init=absent", r"run '.*absent' does not exist\. Pretrained weights: "),
        ("train.init=absent.safetensors", r"file '.*absent\.safetensors' does not exist"),
    ],
)
def test_init_refuses_what_does_not_fit(tmp_path, monkeypatch, finished_run, override, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as refused:
        train(tiny(f"train.init={finished_run}", override), tmp_path / "run", CPU)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_init_refuses_a_full_state(tmp_path, finished_run):
    state = RunFolder(finished_run).latest_state()
    with pytest.raises(UserError, match="full training state"):
        train(tiny(f"train.init={state}"), tmp_path / "run", CPU)


def test_resume_after_a_kill_between_saves(run_folder, finished_run):
    """Work after the last saved state is repeated exactly, and the log has no line twice."""
    folder = RunFolder(run_folder)
    folder.latest_state().unlink()  # as if killed before it was written
    (folder.states / ".000000000128.safetensors.1.tmp").write_bytes(b"half a file")
    with open(folder.log, "a") as log:
        log.write('{"kind": "train", "ima')
    resume(run_folder)
    assert_equal(latest(run_folder), latest(finished_run))
    assert not list(run_folder.rglob("*.tmp"))
    iterations = [entry["iteration"] for entry in entries(run_folder, "train")]
    assert iterations == [3, 4, 6, 8]


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_state_costs_one_interval(run_folder, finished_run, damage):
    """The run resumes from the state before it, says so, and ends the same."""
    newest = RunFolder(run_folder).latest_state()
    content = bytearray(newest.read_bytes())
    if damage == "truncated":
        del content[-100:]
    else:
        content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    reporter = Recorder()
    resume(run_folder, reporter=reporter)
    assert any(newest.name in text and "damaged" in text and "image 64" in text for text in reporter.messages)
    assert_equal(latest(run_folder), latest(finished_run))
    assert newest.with_suffix(".damaged").read_bytes() == content
    assert newest.name in entries(run_folder, "note")[0]["text"]


def test_seed_fixes_the_run(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tiny(f"seed={seed}", f"train.images={BATCH}"), tmp_path / name, CPU)
    a, b, c = (latest(tmp_path / name) for name in "abc")
    assert_equal(a, b)
    for name in ("rng.method", "nets.energy.out.parametrizations.weight.original"):
        assert not torch.equal(a[name], c[name])


def test_contents_of_a_run_folder(finished_run):
    folder = RunFolder(finished_run)
    assert config_io.load_config(str(folder.config)) == tiny()
    assert saved_at(finished_run) == [64, 128]  # train.keep=2
    assert sorted(path.name for path in folder.samples.iterdir()) == ["000000000064.png", "000000000128.png"]
    assert any(folder.tensorboard.iterdir())
    assert folder.snapshot.stat().st_size < folder.latest_state().stat().st_size / 2
    kinds = [entry["kind"] for entry in read_log(folder.log)]
    assert (kinds[0], kinds[-1]) == ("start", "stop")
    stats = entries(finished_run, "train")
    assert [entry["iteration"] for entry in stats] == [3, 4, 6, 8]
    assert {"energy_gap", "reconstruction_mse", "x_displacement_rms", "grad_norm_energy"} <= stats[0].keys()
    assert not list(finished_run.rglob("*.tmp"))


def test_learning_rate_decays_per_epoch(tmp_path, few_images):
    size = ("train.images=80", "train.batch=40", "train.log_every=1")
    train(tiny(*few_images, *size, "optim.energy.lr_decay=0.5", "optim.energy.lr=1e-3"), tmp_path / "run", CPU)
    assert [entry["lr_energy"] for entry in entries(tmp_path / "run", "train")] == [1e-3, 0.5e-3]


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (("guard.max_energy_gap=1e-9",), "above guard.max_energy_gap", "guard.max_energy_gap=100"),
        (("optim.energy.lr=1e30", "nets.spectral_norm=false"), "is nan", "optim.energy.lr=1e-4"),
    ],
)
def test_divergence_stops_the_run_at_its_last_valid_state(tmp_path, overrides, message, remedy):
    out = tmp_path / "run"
    with pytest.raises(Diverged, match="diverged at image") as stopped:
        train(tiny(*overrides, "train.save_every=16", "train.images=48"), out, CPU)
    folder = RunFolder(out)
    for text in (message, "optim.energy.lr", str(folder.latest_state()), "dualmcmc train --resume"):
        assert text in str(stopped.value)
    assert read_log(folder.log)[-1]["kind"] == "diverged"
    for line in folder.log.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert resume(out, remedy).stop_reason == "finished"


def test_weights_ruined_by_the_last_update_are_not_saved(tmp_path):
    """The statistics of the last iteration are from before its update, so they are still fine."""
    out = tmp_path / "run"
    with pytest.raises(Diverged):
        train(tiny("optim.energy.lr=1e30", "nets.spectral_norm=false"), out, CPU, max_images=BATCH)
    assert saved_at(out) == [0]
    snapshot = load_file(RunFolder(out).snapshot)
    assert all(value.isfinite().all() and value.abs().max() < 100 for value in snapshot.values())
    assert not list(RunFolder(out).samples.iterdir())


def test_states_from_before_a_divergence_stay(run_folder):
    with pytest.raises(Diverged):
        resume(run_folder, "guard.max_energy_gap=1e-9", "train.images=256")
    assert saved_at(run_folder) == [64, 128]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_rollback_is_a_resume_with_reduced_rates(tmp_path, monkeypatch, device):
    """Bit for bit the run of someone who resumes by hand with these settings."""
    settings = ["train.log_every=1", "guard.on_divergence=rollback", "guard.backoff=0.25"]
    train(tiny(*settings), tmp_path / "by hand", device, max_images=64)
    _, reduced = guard.back_off(tiny(*settings))
    resume(tmp_path / "by hand", *(f"{key}={value}" for key, value in reduced.items()), device=device)
    real, failed = guard.check, []

    def fail_once(record, cfg):
        if record.get("images") == 96 and not failed:
            failed.append(True)
            raise Diverged("simulated")
        real(record, cfg)

    monkeypatch.setattr(guard, "check", fail_once)
    reporter = Recorder()
    assert train(tiny(*settings), tmp_path / "rolled", device, reporter=reporter).stop_reason == "finished"
    assert_equal(latest(tmp_path / "rolled"), latest(tmp_path / "by hand"))
    (event,) = entries(tmp_path / "rolled", "rollback")
    assert (event["images"], event["diverged_at"], event["reduced"]) == (64, 96, reduced)
    assert any("rollback 1 of 3 to image 64" in text for text in reporter.messages)
    assert len({(tmp_path / name / "config.yaml").read_text() for name in ("rolled", "by hand")}) == 1
    images = [entry["images"] for entry in entries(tmp_path / "rolled", "train")]
    assert images == sorted(set(images))  # the discarded iterations are not in the log


def test_rollbacks_are_limited_and_counted_over_resumes(tmp_path):
    out = tmp_path / "run"
    hopeless = ["guard.max_energy_gap=1e-9", "guard.on_divergence=rollback", "guard.max_rollbacks=2"]
    with pytest.raises(Diverged, match="after 2 rollbacks"):
        train(tiny(*hopeless), out, CPU)
    assert [entry["number"] for entry in entries(out, "rollback")] == [1, 2]
    assert resumed_config(out, []).optim.energy.lr == pytest.approx(tiny().optim.energy.lr / 4)
    with pytest.raises(Diverged, match="after 2 rollbacks"):
        resume(out)


@pytest.mark.parametrize(
    "overrides",
    [
        ("teaching.x_chain.step_size=1e6",),
        ("teaching.z_chain.step_size=1e3",),
        ("optim.energy.lr=1e3", "nets.spectral_norm=false"),
        ("optim.inference.lr=1e4",),
    ],
)
def test_divergence_is_detected_within_one_log_interval(tmp_path, overrides):
    with pytest.raises(Diverged):
        train(tiny(*overrides, "train.save_every=1000", "train.sample_every=1000"), tmp_path / "run", CPU)
    assert entries(tmp_path / "run", "diverged")[0]["images"] == 3 * BATCH  # train.log_every=3


def test_rollback_rescues_an_unstable_run(tmp_path):
    """Its z-step is too large; an eighth of it is not."""
    config = tiny("teaching.z_chain.step_size=0.05", "guard.max_z_displacement=1", "guard.on_divergence=rollback",
                  "guard.backoff=0.125", "train.log_every=2")  # fmt: skip
    assert train(config, tmp_path / "run", CPU).stop_reason == "finished"
    assert len(entries(tmp_path / "run", "rollback")) == 1


def test_second_run_in_the_same_folder_is_refused(tmp_path):
    out, messages = tmp_path / "run", []

    def start_others():
        for attempt in (
            lambda: train(tiny(), out, CPU, resume=True),
            lambda: train(tiny(), out, CPU),
            lambda: resumed_config(out, []),
        ):
            with pytest.raises(UserError) as error:
                attempt()
            messages.append(str(error.value))

    train(tiny("train.images=32"), out, CPU, reporter=Recorder(2, start_others))
    assert ["is being trained by this process" in text for text in messages] == [True, False, True]
    assert "already contains a run" in messages[1]
    resume(out, "train.images=48")  # the lock is released at the end


def test_of_two_new_runs_the_slower_one_is_refused(tmp_path, finished_run, monkeypatch):
    """Another run starts in the folder, and ends, while this one loads its images."""
    out, load = tmp_path / "run", trainer.load_data

    def slow(*arguments):
        shutil.copytree(finished_run, out)
        return load(*arguments)

    monkeypatch.setattr(trainer, "load_data", slow)
    with pytest.raises(UserError, match="already contains a run"):
        train(tiny("seed=1"), out, CPU)


@pytest.fixture
def train_states(monkeypatch):
    """The states that runs create, for tests that modify them."""
    states, original = [], TrainState.__init__

    def recorded(self, *arguments):
        original(self, *arguments)
        states.append(self)

    monkeypatch.setattr(TrainState, "__init__", recorded)
    return states


def test_sigterm_without_time_for_a_dry_run_still_saves_finite_weights_only(tmp_path, train_states):
    def ruin_and_terminate():
        next(train_states[0].trio.energy.parameters()).data.fill_(torch.nan)
        os.kill(os.getpid(), signal.SIGTERM)

    config = tiny("train.grace=0", "train.images=1000", "train.log_every=100")
    with pytest.raises(Diverged, match="not finite"):
        train(config, tmp_path / "run", CPU, reporter=Recorder(6, ruin_and_terminate))
    assert saved_at(tmp_path / "run") == [0, 64]


def test_state_is_synchronized_before_every_save(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(TrainState, "synchronize", lambda self: calls.append(self.images))
    train(tiny(), tmp_path / "run", CPU)
    assert calls == [0, 64, 128]


def test_run_killed_before_its_first_state_can_be_started_again(tmp_path, few_images, monkeypatch):
    config, folder = tiny(*few_images), RunFolder(tmp_path / "run")
    train(config, tmp_path / "whole", CPU)

    def killed(self, path):
        path.with_name(".x.1.tmp").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainState, "save", killed)
        train(config, folder.root, CPU)
    assert folder.config.exists()
    assert not folder.has_states()
    train(config, folder.root, CPU)
    assert_equal(latest(folder.root), latest(tmp_path / "whole"))
    assert not list(folder.root.rglob("*.tmp"))
    for path in folder.saved_states():
        path.unlink()
    folder.snapshot.unlink()
    with pytest.raises(UserError, match=r"contains log\.jsonl, which a new run would write over"):
        train(config, folder.root, CPU)


@pytest.fixture
def at_chain_step(monkeypatch):
    """Call a function during the n-th chain step of the test, with no patience for the iteration it is in."""
    monkeypatch.setattr(loop, "PATIENCE", 0.0)
    original, count = langevin._value_and_grad, 0

    def arrange(at, action):
        def counted(potential, state):
            nonlocal count
            count += 1
            if count == at:
                action()
            return original(potential, state)

        monkeypatch.setattr(langevin, "_value_and_grad", counted)

    return arrange


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


SLOW_TO_SAVE = ("train.images=96", "train.save_every=1000", "train.sample_every=1000")


@pytest.mark.parametrize("overrides", [("nets.kind=resnet",), ("engine.micro_batch=5", "teaching.energy_augment=0.5")])
@pytest.mark.parametrize("step", [13, 15], ids=["x-chain", "z-chain"])  # of the fourth iteration, 2 + 2 steps each
def test_iteration_is_abandoned_between_chain_steps_and_repeated(tmp_path, few_images, at_chain_step, overrides, step):
    settings = (*few_images, *overrides, *SLOW_TO_SAVE)
    train(tiny(*settings), tmp_path / "whole", CPU)
    at_chain_step(step, interrupt)
    recorder = Recorder()
    result = train(tiny(*settings), tmp_path / "parts", CPU, reporter=recorder)
    assert (result.stop_reason, result.images, result.iterations) == ("SIGINT", 48, 3)
    assert any("SIGINT: abandoned an iteration between two chain steps" in text for text in recorder.messages)
    assert saved_at(tmp_path / "parts") == [0, 48]
    resume(tmp_path / "parts")
    assert_equal(latest(tmp_path / "parts"), latest(tmp_path / "whole"))


def test_time_limit_ends_a_chain(tmp_path, few_images, monkeypatch):
    monkeypatch.setattr(loop, "PATIENCE", 0.0)
    result = train(tiny(*few_images), tmp_path / "run", CPU, max_minutes=1e-9)
    assert (result.stop_reason, result.images) == ("max-minutes", 0)
    assert resume(tmp_path / "run").stop_reason == "finished"


def test_iteration_with_a_second_x_chain_is_finished(tmp_path, few_images, at_chain_step):
    """That chain follows the first updates, which could not be undone."""
    at_chain_step(6, interrupt)  # the last one of the first iteration
    result = train(tiny(*few_images, "teaching.second_x_chain=true"), tmp_path / "run", CPU)
    assert (result.stop_reason, result.images) == ("SIGINT", 16)


def test_iterations_of_other_methods_are_abandoned(tmp_path, few_images, at_chain_step):
    at_chain_step(2, interrupt)
    result = train(tiny(*few_images, "method=short-run"), tmp_path / "run", CPU)
    assert (result.stop_reason, result.images) == ("SIGINT", 0)


def test_unchecked_state_replaces_no_older_one(tmp_path, monkeypatch, few_images):
    monkeypatch.setattr(loop, "PATIENCE", 0.0)
    settings = (*few_images, "train.images=96", "train.save_every=16", "train.keep=1", "train.sample_every=1000")
    train(tiny(*settings), tmp_path / "run", CPU, reporter=Recorder(3, interrupt))
    assert saved_at(tmp_path / "run") == [32, 48]
    assert not list(RunFolder(tmp_path / "run").samples.iterdir())  # no time for a sample grid either


def test_dry_run_is_abandoned_but_weights_are_checked(tmp_path, monkeypatch, few_images):
    monkeypatch.setattr(loop, "PATIENCE", 0.0)
    checks, original = [], TrainState.is_finite
    monkeypatch.setattr(TrainState, "is_finite", lambda self: checks.append(self.images) or original(self))
    train(tiny(*few_images, *SLOW_TO_SAVE), tmp_path / "run", CPU, reporter=Recorder(2, interrupt))
    assert checks == [32]
    assert saved_at(tmp_path / "run") == [0, 32]


@pytest.mark.parametrize("trace", ["config.yaml", "log.jsonl", "snapshot.safetensors", "results"])
def test_folder_of_another_run_is_refused(tmp_path, trace):
    """Its states may have been deleted to save space."""
    path = tmp_path / "run" / trace
    path.mkdir(parents=True) if trace == "results" else (path.parent.mkdir(), path.write_text("precious"))
    with pytest.raises(UserError, match=f"contains {trace}, which a new run would write over: choose another --out"):
        train(tiny(), tmp_path / "run", CPU)
    assert os.listdir(tmp_path / "run") == [trace]
    assert path.is_dir() or path.read_text() == "precious"


def test_run_without_states_offers_its_weights(run_folder, tmp_path):
    shutil.rmtree(RunFolder(run_folder).states)
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
    for attempt in (lambda: resume(run_folder), lambda: train(tiny(), run_folder, CPU)):
        with pytest.raises(UserError, match=f"--init {run_folder}"):
            attempt()
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before
    assert train(tiny(f"train.init={run_folder}"), tmp_path / "next", CPU).stop_reason == "finished"


@pytest.mark.parametrize(
    "name",
    [
        ".lock", "log.jsonl", "states", "samples", "snapshots", "tensorboard", "wandb", "config.yaml", "trackers.json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("resumed", [False, True])
def test_links_are_not_followed(run_folder, tmp_path, name, resumed):
    """A run folder from someone else must not make us write elsewhere."""
    precious = tmp_path / "precious"
    is_folder = name in ("states", "samples", "snapshots", "tensorboard", "wandb")
    folder = run_folder if resumed else tmp_path / "new"
    folder.mkdir(exist_ok=True)
    path = folder / name
    if is_folder:
        precious.mkdir()
        (precious / f"{0:012d}.safetensors").write_text("keep me")
        shutil.rmtree(path, ignore_errors=True)
    else:
        precious.write_text("keep me")
        path.unlink(missing_ok=True)
    path.symlink_to(precious)
    with pytest.raises(UserError, match=f"{name}' is a link"):
        resume(folder) if resumed else train(tiny(), folder, CPU)
    kept = precious / f"{0:012d}.safetensors" if is_folder else precious
    assert kept.read_text() == "keep me"
    assert not is_folder or os.listdir(precious) == [kept.name]


def test_hard_link_as_lock_is_not_written(run_folder, tmp_path):
    (tmp_path / "precious").write_text("keep me")
    RunFolder(run_folder).lock.unlink()
    os.link(tmp_path / "precious", RunFolder(run_folder).lock)
    with pytest.raises(UserError, match=r"\.lock': it is a hard link"):
        resume(run_folder)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_files_of_others_are_not_removed(tmp_path):
    (tmp_path / "run" / "samples").mkdir(parents=True)
    theirs = [tmp_path / "run" / ".notes.tmp", tmp_path / "run" / "samples" / ".mine.tmp"]
    for path in theirs:
        path.touch()
    train(tiny("train.images=64"), tmp_path / "run", CPU, max_images=32)
    resume(tmp_path / "run")
    assert all(path.exists() for path in theirs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", "x"),
        ("images", -16),
        ("images", 10**400),
        ("seconds", "x"),
        ("seconds", float("nan")),
        ("rollbacks", 0.5),
    ],
)
def test_state_with_an_impossible_count_is_refused(run_folder, name, value):
    path = RunFolder(run_folder).latest_state()
    tensors, info, _ = checkpoint.load(path)
    checkpoint.save(path, tensors, info | {name: value})
    with pytest.raises(UserError, match="damaged"):
        resume(run_folder)


@pytest.mark.parametrize("part", ["exp_avg_sq", "step"])
def test_state_with_moments_of_another_shape_is_refused(run_folder, part):
    path = RunFolder(run_folder).latest_state()
    tensors, info, _ = checkpoint.load(path)
    checkpoint.save(path, tensors | {f"optim.energy.0.{part}": torch.zeros(5)}, info)
    with pytest.raises(UserError, match=r"damaged .*has another shape"):
        resume(run_folder)


def test_link_to_a_run_folder_is_followed(tmp_path):
    """What the user names is the user's choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert train(tiny(f"train.images={BATCH}"), tmp_path / "run", CPU).stop_reason == "finished"
    assert (tmp_path / "disk" / "snapshot.safetensors").exists()


def test_public_interface(tmp_path):
    config = dualmcmc.load_config("digits", [*TINY, f"train.images={BATCH}"])
    assert dualmcmc.train(config, str(tmp_path / "run"), "cpu").images == BATCH
    with pytest.raises(UserError, match="already contains a run"):
        dualmcmc.train(config, str(tmp_path / "run"), "cpu")


def test_minutes_of_training_alone(tmp_path, monkeypatch):
    """Over all sessions, without what precedes the first iteration."""
    monkeypatch.setattr(TrainStep, "prepare", lambda *arguments: time.sleep(0.5))
    config = tiny("train.images=100000000", "train.log_every=1")
    first = train(config, tmp_path / "run", CPU, max_training_minutes=0.005)
    assert first.stop_reason == "max-minutes"
    assert first.seconds >= 0.3
    second = train(None, tmp_path / "run", CPU, resume=True, max_training_minutes=0.006)
    assert second.seconds >= 0.36
    assert second.images > first.images


def test_limits(tmp_path):
    result = train(tiny(), tmp_path / "images", CPU, max_images=40)
    assert (result.stop_reason, result.images) == ("max-images", 48)  # whole batches
    result = train(tiny("train.images=100000000"), tmp_path / "minutes", CPU, max_minutes=1e-4)
    assert result.stop_reason == "max-minutes"
    assert saved_at(tmp_path / "minutes")[-1] == result.images


def test_resumed_run_may_be_extended_but_not_changed(run_folder):
    assert resume(run_folder, "train.images=144").images == 144
    assert config_io.load_config(str(run_folder / "config.yaml")).train.images == 144
    for override in ("seed=1", "nets.energy_width=8", "teaching.latent_dim=5", "data.holdout=0.5", "ema.half_life=0"):
        with pytest.raises(UserError, match="a resumed run cannot change"):
            resumed_config(run_folder, [override])
    with pytest.raises(UserError, match="uses preset 'digits', not 'mnist'"):
        resumed_config(run_folder, [], "mnist")


@pytest.mark.parametrize("text", ["", "seed: 5", "a: ["])
def test_resume_reads_the_state_not_the_config_file(run_folder, text):
    (run_folder / "config.yaml").write_text(text)
    assert resumed_config(run_folder, []) == tiny()
    resume(run_folder)
    assert config_io.load_config(str(run_folder / "config.yaml")) == tiny()


def test_resume_rewrites_a_deleted_snapshot(run_folder, finished_run):
    RunFolder(run_folder).snapshot.unlink()
    resume(run_folder)
    assert_equal(*(load_file(RunFolder(path).snapshot) for path in (run_folder, finished_run)))


def test_run_must_resume_on_the_same_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pixels)
    np.savez(tmp_path / "b.npz", pixels[::-1])
    train(tiny("data.source=folder", f"data.path={tmp_path / 'a.npz'}"), tmp_path / "run", CPU, max_images=32)
    (tmp_path / "a.npz").rename(tmp_path / "moved.npz")
    with pytest.raises(UserError, match="other data"):
        resume(tmp_path / "run", f"data.path={tmp_path / 'b.npz'}")
    assert resume(tmp_path / "run", f"data.path={tmp_path / 'moved.npz'}").stop_reason == "finished"


def test_move_to_another_type_of_device_is_reported(run_folder, monkeypatch):
    restore = rng.restore
    monkeypatch.setattr(
        rng, "restore", lambda source, tensors, plain: restore(source, tensors, plain | {"device": "cuda"})
    )
    reporter = Recorder()
    assert resume(run_folder, "train.images=144", reporter=reporter).stop_reason == "finished"
    assert any("its noise stream restarts" in text for text in reporter.messages)


def test_bad_data_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match=r"data\.path"):
        train(config_io.load_config("mnist", TINY), tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_no_host_sync_in_an_iteration(tmp_path, monkeypatch):
    """An iteration reads no tensor's value, except for Adam's step counters, which are on the host."""
    reads = 0
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        method = getattr(torch.Tensor, name)

        def counted(self, *arguments, original=method, **options):
            nonlocal reads
            reads += 1
            return original(self, *arguments, **options)

        monkeypatch.setattr(torch.Tensor, name, counted)
    adam_step, iterate, per_iteration = torch.optim.Adam.step, TrainStep.__call__, []

    def uncounted(self, *arguments):
        nonlocal reads
        before = reads
        adam_step(self, *arguments)
        reads = before

    def watched(self):
        before = reads
        iterate(self)
        per_iteration.append(reads - before)

    monkeypatch.setattr(torch.optim.Adam, "step", uncounted)
    monkeypatch.setattr(TrainStep, "__call__", watched)
    train(tiny("train.images=64"), tmp_path / "run", CPU)
    assert per_iteration == [0] * 4
    assert reads > 0, "the log reads values, so the counter works"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_placement_of_the_images_changes_nothing(tmp_path, device):
    """In memory, streamed from a packed file, or first one and then the other: the same run, bit for bit."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pixels)
    pack.write(tmp_path / "a.pack", {"train": pixels[:, None]}, (1, 8, 8), {"crop": "center", "resize": "lanczos"})
    common = ("data.source=folder", "data.holdout=0.1", "data.flip=true", "train.images=96", "train.save_every=48")

    def config(name, place):
        return tiny(*common, f"data.path={tmp_path / name}", f"data.place={place}")

    train(config("a.npz", "device"), tmp_path / "memory", device)
    train(config("a.pack", "stream"), tmp_path / "streamed", device)
    train(config("a.pack", "stream"), tmp_path / "moved", device, max_images=48)
    resume(tmp_path / "moved", "data.place=device", device=device)
    memory, streamed, moved = (
        load_file(RunFolder(tmp_path / name).snapshot) for name in ("memory", "streamed", "moved")
    )
    assert_equal(memory, streamed)
    assert_equal(memory, moved)
    starts = [entries(tmp_path / name, "start")[0] for name in ("memory", "streamed")]
    assert [start["resident"] for start in starts] == [True, False]
    assert (starts[0]["data"]["crop"], starts[0]["data"]["images"]) == ("center", 54)


def test_flip_changes_the_run(tmp_path, finished_run):
    assert not tiny().data.flip
    train(tiny("data.flip=true", "train.images=64"), tmp_path / "run", CPU)
    plain, flipped = load_file(RunFolder(finished_run).state_path(64)), latest(tmp_path / "run")
    assert not torch.equal(plain["nets.inference.mean.weight"], flipped["nets.inference.mean.weight"])


def test_run_finds_its_images_from_any_working_directory(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", np.zeros((20, 8, 8), np.uint8))
    monkeypatch.chdir(tmp_path)
    train(tiny("data.source=folder", "data.path=a.npz", "data.holdout=0.2"), tmp_path / "run", CPU, max_images=16)
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run", max_images=32).images == 32


def test_skipped_images_are_reported_and_logged(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    folder = image_folder(tmp_path / "photos", pixels)
    (folder / "000003.png").write_bytes(b"")
    reporter = Recorder()
    config = tiny("data.source=folder", f"data.path={folder}", "data.skip_bad=true", f"train.images={BATCH}")
    train(config, tmp_path / "run", CPU, reporter=reporter)
    assert any("000003.png" in text for text in reporter.messages)
    assert "000003.png" in entries(tmp_path / "run", "start")[0]["data"]["notes"][0]
