"""Runs that survive: exact resume, clean stops, divergence caught with the last good state kept."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dualmcmc import data, rng, settings
from dualmcmc.data import pack
from dualmcmc.engine import guard
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.journal import read
from dualmcmc.engine.loop import resumed_config, train
from dualmcmc.engine.progress import Reporter
from dualmcmc.engine.state import TrainState
from dualmcmc.errors import Diverged, UserError
from tests.conftest import TINY, tiny

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]
RESNET = ("nets.kind=resnet", "ema.energy=true")


def tensors(path):
    """Everything in a saved state."""
    return load_file(path)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(
    "overrides", [(), RESNET, ("ema.half_life=0", "teaching.second_x_chain=true", "teaching.energy_consistency=2")]
)
def test_resume_is_exact(tmp_path, overrides, device):
    """2N iterations equal N, stop, resume, N: weights, moments, averages and random states, bit for bit.

    The batches cross epochs, and the two runs draw their pictures at different times.
    """
    size = ("train.batch=400", "train.images=3200", "train.save_every=1600")  # 1,438 images an epoch
    config = tiny(*overrides, *size, "train.sample_every=100000")
    train(config, tmp_path / "whole", device)
    train(tiny(*overrides, *size, "train.sample_every=400"), tmp_path / "parts", device, max_images=1600)
    torch.manual_seed(999)  # whatever another process has drawn meanwhile
    outcome = train(resumed_config(tmp_path / "parts", []), tmp_path / "parts", device, resume=True)
    assert (outcome.why, outcome.images, outcome.iterations) == ("finished", 3200, 8)
    whole, parts = (RunFolder(tmp_path / name) for name in ("whole", "parts"))
    assert_same(tensors(whole.latest_state()), tensors(parts.latest_state()))
    assert_same(load_file(whole.snapshot), load_file(parts.snapshot))
    first = load_file(whole.saved_states()[0])
    assert not all(torch.equal(value, first[name]) for name, value in tensors(whole.latest_state()).items())


def test_resume_after_a_kill_between_saves(tmp_path):
    """Work past the last saved state is done again, the same way, and the log has no line twice."""
    config = tiny("train.save_every=48")  # saves at 48 and 96, the end at 128
    train(config, tmp_path / "whole", CPU)
    train(config, tmp_path / "killed", CPU, max_images=112)
    killed = RunFolder(tmp_path / "killed")
    killed.latest_state().unlink()  # as if killed before the state at 112 was written
    (killed.states / ".000000000112.safetensors.1.tmp").write_bytes(b"half a file")
    with open(killed.log, "a") as log:
        log.write('{"kind": "train", "ima')
    train(resumed_config(tmp_path / "killed", []), tmp_path / "killed", CPU, resume=True)
    whole = RunFolder(tmp_path / "whole")
    assert_same(tensors(whole.latest_state()), tensors(killed.latest_state()))
    assert not list(killed.root.rglob("*.tmp"))
    lines = [entry["iteration"] for entry in read(killed.log) if entry["kind"] == "train"]
    assert lines == sorted(set(lines))


def test_the_seed_fixes_the_run(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        train(tiny(f"seed={seed}", "train.images=32"), tmp_path / name, CPU)
    a, b, c = (tensors(RunFolder(tmp_path / name).latest_state()) for name in "abc")
    assert_same(a, b)
    assert not torch.equal(a["rng.method"], c["rng.method"])
    assert not torch.equal(a["nets.energy.out.parametrizations.weight.original"],
                           c["nets.energy.out.parametrizations.weight.original"])  # fmt: skip


def test_a_run_folder_holds_what_it_should(finished_run):
    folder = RunFolder(finished_run)
    assert settings.load_config(str(folder.config)) == tiny()
    assert [path.stem for path in folder.saved_states()] == ["000000000064", "000000000128"]  # train.keep=2
    assert sorted(path.name for path in folder.samples.iterdir()) == ["000000000064.png", "000000000128.png"]
    assert any(folder.tensorboard.iterdir())
    assert folder.snapshot.stat().st_size < folder.latest_state().stat().st_size / 2
    kinds = [entry["kind"] for entry in read(folder.log)]
    assert kinds[0] == "start"
    assert kinds[-1] == "stop"
    numbers = [entry for entry in read(folder.log) if entry["kind"] == "train"]
    assert [entry["iteration"] for entry in numbers] == [3, 4, 6, 8]
    assert {"energy_gap", "reconstruction_mse", "x_moved", "grad_norm_energy"} <= numbers[0].keys()
    assert not list(finished_run.rglob("*.tmp"))


def test_learning_rate_decays_by_the_epoch(tmp_path):
    train(tiny("train.images=2900", "train.batch=1450", "train.log_every=1", "optim.energy.lr_decay=0.5",
               "optim.energy.lr=1e-3"), tmp_path / "run", CPU)  # fmt: skip
    rates = [entry["lr_energy"] for entry in read(RunFolder(tmp_path / "run").log) if entry["kind"] == "train"]
    assert rates == [1e-3, 0.5e-3]  # 1,438 images an epoch


@pytest.mark.parametrize(
    ("overrides", "words", "gentler"),
    [
        (("guard.energy_gap=1e-9",), "guard.energy_gap", "guard.energy_gap=100"),
        (("optim.energy.lr=1e30", "nets.spectral_norm=false"), "is nan", "optim.energy.lr=1e-4"),
    ],
)
def test_divergence_stops_the_run_and_the_last_good_state_is_good(tmp_path, overrides, words, gentler):
    out = tmp_path / "run"
    with pytest.raises(Diverged, match="diverged at image") as stopped:
        train(tiny(*overrides, "train.save_every=16"), out, CPU)
    assert words in str(stopped.value)
    assert "optim.energy.lr" in str(stopped.value)
    folder = RunFolder(out)
    assert str(folder.latest_state()) in str(stopped.value)
    assert read(folder.log)[-1]["kind"] == "diverged"
    for line in folder.log.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    outcome = train(resumed_config(out, [gentler]), out, CPU, resume=True)
    assert outcome.why == "finished"


def test_a_stop_right_after_a_ruinous_update_saves_nothing(tmp_path):
    """The numbers of the last iteration are sound, the weights it left are not: they must not be kept."""
    out = tmp_path / "run"
    with pytest.raises(Diverged):
        train(tiny("optim.energy.lr=1e30", "nets.spectral_norm=false"), out, CPU, max_images=16)
    folder = RunFolder(out)
    assert [path.stem for path in folder.saved_states()] == ["000000000000"]
    assert all(value.isfinite().all() for value in load_file(folder.snapshot).values())
    assert max(value.abs().max() for value in load_file(folder.snapshot).values()) < 100
    assert not list(folder.samples.iterdir())


def test_states_from_before_the_divergence_stay(tmp_path):
    out = tmp_path / "run"
    train(tiny("train.save_every=16"), out, CPU, max_images=64)
    with pytest.raises(Diverged):
        train(resumed_config(out, ["guard.energy_gap=1e-9"]), out, CPU, resume=True)
    assert [path.stem for path in RunFolder(out).saved_states()] == ["000000000048", "000000000064"]


def fails_once(monkeypatch, at):
    """The guard sees a divergence where there is none, the first time the run comes to image `at`."""
    real, seen = guard.check, []

    def check(record, cfg):
        if record.get("images") == at and not seen:
            seen.append(at)
            raise Diverged("made up")
        real(record, cfg)

    monkeypatch.setattr(guard, "check", check)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_rollback_is_a_resume_with_gentler_settings(tmp_path, monkeypatch, device):
    """What follows is, bit for bit, what a person would get who resumed with the lowered settings by hand."""
    changes = ["train.images=512", "train.log_every=1", "guard.on_divergence=rollback", "guard.lower=0.25"]
    train(tiny(*changes), tmp_path / "by hand", device, max_images=256)
    _, lowered = guard.gentler(tiny(*changes))
    by_hand = resumed_config(tmp_path / "by hand", [f"{key}={value}" for key, value in lowered.items()])
    train(by_hand, tmp_path / "by hand", device, resume=True)
    fails_once(monkeypatch, 304)
    said = []
    reporter = Reporter()
    reporter.say = said.append
    outcome = train(tiny(*changes), tmp_path / "rolled", device, reporter=reporter)
    assert outcome.why == "finished"
    rolled, other = (RunFolder(tmp_path / name) for name in ("rolled", "by hand"))
    assert_same(tensors(rolled.latest_state()), tensors(other.latest_state()))
    (event,) = [entry for entry in read(rolled.log) if entry["kind"] == "rollback"]
    assert event["images"] == 256
    assert event["diverged_at"] == 304
    assert event["lowered"] == lowered
    assert any("rollback 1 of 3 to image 256" in text for text in said)
    assert settings.load_config(str(rolled.config)) == by_hand
    images = [entry["images"] for entry in read(rolled.log) if entry["kind"] == "train"]
    assert images == sorted(set(images))  # the way that led astray is gone


def test_rollbacks_come_to_an_end_and_are_counted_over_resumes(tmp_path, monkeypatch):
    out, hopeless = tmp_path / "run", ["guard.energy_gap=1e-9", "guard.on_divergence=rollback", "guard.rollbacks=2"]
    with pytest.raises(Diverged, match="after 2 rollbacks"):
        train(tiny(*hopeless), out, CPU)
    folder = RunFolder(out)
    assert [entry["number"] for entry in read(folder.log) if entry["kind"] == "rollback"] == [1, 2]
    config = resumed_config(out, [])
    assert config.optim.energy.lr == pytest.approx(tiny().optim.energy.lr / 4)
    with pytest.raises(Diverged, match="after 2 rollbacks"):
        train(config, out, CPU, resume=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ("teaching.x_chain.step_size=1e6",),
        ("teaching.z_chain.step_size=1e3",),
        ("optim.energy.lr=1e3", "nets.spectral_norm=false"),
        ("optim.inference.lr=1e4",),
    ],
)
def test_an_unstable_run_is_caught_within_one_log_interval(tmp_path, overrides):
    with pytest.raises(Diverged):
        rarely = ("train.log_every=5", "train.save_every=100000", "train.sample_every=100000")
        train(tiny(*overrides, *rarely), tmp_path / "run", CPU)
    (diverged,) = [entry for entry in read(RunFolder(tmp_path / "run").log) if entry["kind"] == "diverged"]
    assert diverged["images"] == 5 * 16


def test_a_rollback_rescues_a_run_that_was_driven_unstable(tmp_path):
    """A z-step eight times too large blows up; a quarter of it does not."""
    config = tiny("teaching.z_chain.step_size=0.05", "guard.z_moved=1", "guard.on_divergence=rollback",
                  "guard.lower=0.125", "train.log_every=2")  # fmt: skip
    assert train(config, tmp_path / "run", CPU).why == "finished"
    numbers = [entry for entry in read(RunFolder(tmp_path / "run").log) if entry["kind"] == "rollback"]
    assert len(numbers) == 1


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_state_costs_one_interval(tmp_path, damage):
    """Detected, said, and the state before it is gone on from; the end is the same."""
    config = tiny("train.keep=3", "train.images=192")
    train(config, tmp_path / "whole", CPU)
    out = tmp_path / "run"
    train(config, out, CPU, max_images=128)
    newest = RunFolder(out).latest_state()
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        del content[-100:]
    else:
        content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    said = []
    reporter = Reporter()
    reporter.say = said.append
    train(resumed_config(out, []), out, CPU, resume=True, reporter=reporter)
    assert any(newest.name in text and "damaged" in text and "image 64" in text for text in said)
    assert_same(*(tensors(RunFolder(tmp_path / name).latest_state()) for name in ("whole", "run")))
    assert (newest.with_suffix(".damaged")).read_bytes() == content
    note = next(entry for entry in read(RunFolder(out).log) if entry["kind"] == "note")
    assert newest.name in note["text"]


def test_a_second_run_on_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    refused = []

    class Second(Reporter):
        def advance(self, done, iteration):
            if iteration == 2:
                for resume in (True, False):
                    with pytest.raises(UserError) as error:
                        train(tiny(), out, CPU, resume=resume)
                    refused.append(str(error.value))
                with pytest.raises(UserError) as error:
                    resumed_config(out, [])
                refused.append(str(error.value))

    train(tiny(), out, CPU, reporter=Second())
    assert "is being trained by" in refused[0]
    assert "is being trained by" in refused[2]
    assert "already holds a run" in refused[1]
    train(resumed_config(out, ["train.images=160"]), out, CPU, resume=True)  # let go of at the end


def test_of_two_new_runs_the_slower_one_is_refused(tmp_path, finished_run, monkeypatch):
    """The other has begun, and ended, while this one read its images."""
    out, real = tmp_path / "run", data.load

    def slow(*given):
        shutil.copytree(finished_run, out)
        return real(*given)

    monkeypatch.setattr("dualmcmc.data.load", slow)
    with pytest.raises(UserError, match="already holds a run"):
        train(tiny("seed=1"), out, CPU)


def test_a_state_that_cannot_be_tried_out_is_at_least_finite(tmp_path, monkeypatch):
    """SIGTERM and no time left, right after an update that ruined a weight."""

    def ruin(done, iteration):
        if iteration == 6:
            with torch.no_grad():
                next(loop.state.trio.energy.parameters()).fill_(torch.nan)
            os.kill(os.getpid(), signal.SIGTERM)

    reporter = Reporter()
    reporter.advance = ruin
    real = TrainState.__init__

    def kept(self, *given):
        real(self, *given)
        loop.state = self

    loop = SimpleNamespace()
    monkeypatch.setattr(TrainState, "__init__", kept)
    with pytest.raises(Diverged, match="not finite"):
        train(
            tiny("train.grace=0", "train.images=1000", "train.log_every=100"), tmp_path / "run", CPU, reporter=reporter
        )
    assert int(RunFolder(tmp_path / "run").latest_state().stem) == 64


def test_every_save_is_agreed_upon_first(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(TrainState, "settle", lambda self: calls.append(self.images))
    train(tiny(), tmp_path / "run", CPU)
    assert calls == [0, 64, 128]


def test_a_kill_before_the_first_state_is_no_dead_end(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.write_config(tiny())
    assert train(tiny(), folder.root, CPU).why == "finished"


def test_from_python_with_plain_words(tmp_path):
    import dualmcmc

    config = dualmcmc.load_config("digits", TINY)
    assert dualmcmc.train(config, str(tmp_path / "run"), "cpu").images == 128
    with pytest.raises(UserError, match="already holds a run"):
        dualmcmc.train(config, str(tmp_path / "run"), "cpu")


def test_limits(tmp_path):
    outcome = train(tiny(), tmp_path / "images", CPU, max_images=40)
    assert (outcome.why, outcome.images) == ("max-images", 48)  # whole batches
    outcome = train(tiny("train.images=100000000"), tmp_path / "minutes", CPU, max_minutes=1e-4)
    assert outcome.why == "max-minutes"
    assert RunFolder(tmp_path / "minutes").latest_state().stem == f"{outcome.images:012d}"


def test_a_resumed_run_may_be_extended_but_not_turned_into_another(tmp_path):
    train(tiny("train.images=16"), tmp_path / "run", CPU)
    longer = resumed_config(tmp_path / "run", ["train.images=48"])
    assert train(longer, tmp_path / "run", CPU, resume=True).images == 48
    assert settings.load_config(str(tmp_path / "run" / "config.yaml")).train.images == 48
    for change in ("seed=1", "nets.energy_width=8", "teaching.latent_dim=5", "data.holdout=0.5", "ema.half_life=0"):
        with pytest.raises(UserError, match="a resumed run cannot change"):
            resumed_config(tmp_path / "run", [change])


@pytest.mark.parametrize("damage", ["", "train: {batch: 3}", "seed: 5", "a: ["])
def test_resume_trusts_the_state_and_not_the_settings_file(tmp_path, damage):
    train(tiny(), tmp_path / "run", CPU, max_images=32)
    (tmp_path / "run" / "config.yaml").write_text(damage)
    config = resumed_config(tmp_path / "run", [])
    assert config == tiny()
    train(config, tmp_path / "run", CPU, resume=True)
    assert settings.load_config(str(tmp_path / "run" / "config.yaml")) == tiny()


def test_a_lost_snapshot_comes_back_on_resume(tmp_path):
    train(tiny("train.images=32"), tmp_path / "run", CPU)
    folder = RunFolder(tmp_path / "run")
    before = load_file(folder.snapshot)
    folder.snapshot.unlink()
    train(resumed_config(folder.root, []), folder.root, CPU, resume=True)
    assert_same(before, load_file(folder.snapshot))


def test_a_run_goes_on_with_the_data_it_began_with(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pixels)
    np.savez(tmp_path / "b.npz", pixels[::-1])
    source = ("data.source=folder", f"data.path={tmp_path / 'a.npz'}")
    train(tiny(*source), tmp_path / "run", CPU, max_images=32)
    (tmp_path / "a.npz").rename(tmp_path / "moved.npz")
    for name, fits in (("b", False), ("moved", True)):
        config = resumed_config(tmp_path / "run", [f"data.path={tmp_path / name}.npz"])
        if fits:
            assert train(config, tmp_path / "run", CPU, resume=True).why == "finished"
        else:
            with pytest.raises(UserError, match="other images"):
                train(config, tmp_path / "run", CPU, resume=True)


def test_a_run_that_moves_to_another_device_says_so(tmp_path, monkeypatch):
    train(tiny(), tmp_path / "run", CPU, max_images=32)
    restore = rng.restore
    monkeypatch.setattr(
        rng, "restore", lambda source, tensors, plain: restore(source, tensors, plain | {"device": "cuda"})
    )
    said = []

    class Listener(Reporter):
        def say(self, text):
            said.append(text)

    config = resumed_config(tmp_path / "run", [])
    assert train(config, tmp_path / "run", CPU, resume=True, reporter=Listener()).why == "finished"
    assert any("noise starts anew" in line for line in said)


def test_bad_data_leaves_nothing_behind(tmp_path):
    config = settings.load_config("mnist", TINY)
    with pytest.raises(UserError, match=r"data\.path"):
        train(config, tmp_path / "run", CPU)
    assert not (tmp_path / "run").exists()


def test_no_host_sync_in_an_iteration(tmp_path, monkeypatch):
    """An iteration reads no tensor's value; Adam's own step counters, which live on the host, do not count."""
    reads = 0
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__"):
        method = getattr(torch.Tensor, name)

        def counted(self, *arguments, original=method, **words):
            nonlocal reads
            reads += 1
            return original(self, *arguments, **words)

        monkeypatch.setattr(torch.Tensor, name, counted)
    adam_step, iterate, seen = torch.optim.Adam.step, Iteration.__call__, []

    def uncounted(self, *arguments):
        nonlocal reads
        before = reads
        adam_step(self, *arguments)
        reads = before

    def watched(self):
        before = reads
        iterate(self)
        seen.append(reads - before)

    monkeypatch.setattr(torch.optim.Adam, "step", uncounted)
    monkeypatch.setattr(Iteration, "__call__", watched)
    train(tiny("train.images=64"), tmp_path / "run", CPU)
    assert seen == [0] * 4
    assert reads > 0, "the log reads values, so the counter works"


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_where_the_images_lie_changes_nothing(tmp_path, device):
    """In memory, streamed from a packed file, or first one and then the other: the same run, bit for bit."""
    pixels = np.random.default_rng(0).integers(0, 256, (150, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", pixels)
    pack.write(tmp_path / "a.pack", {"train": pixels[:, None]}, (1, 8, 8), {"crop": "center", "resize": "lanczos"})
    source = ("data.source=folder", "data.holdout=0.1", "data.flip=true", "train.batch=40", "train.images=640")

    def config(name, place):
        return tiny(*source, f"data.path={tmp_path / name}", f"data.place={place}", "train.save_every=320")

    train(config("a.npz", "device"), tmp_path / "memory", device)
    train(config("a.pack", "stream"), tmp_path / "streamed", device)
    train(config("a.pack", "stream"), tmp_path / "moved", device, max_images=320)
    moved = resumed_config(tmp_path / "moved", ["data.place=device"])
    train(moved, tmp_path / "moved", device, resume=True)
    whole, streamed, moved = (RunFolder(tmp_path / name) for name in ("memory", "streamed", "moved"))
    assert_same(load_file(whole.snapshot), load_file(streamed.snapshot))
    assert_same(load_file(whole.snapshot), load_file(moved.snapshot))
    records = [read(run.log)[0] for run in (whole, streamed)]
    assert [record["resident"] for record in records] == [True, False]
    assert records[0]["data"]["crop"] == "center"
    assert records[0]["data"]["images"] == 135


def test_mirroring_is_off_unless_asked_for(tmp_path):
    for name, overrides in (("plain", ()), ("off", ("data.flip=false",)), ("on", ("data.flip=true",))):
        train(tiny("train.images=64", *overrides), tmp_path / name, CPU)
    plain, off, on = (load_file(RunFolder(tmp_path / name).snapshot) for name in ("plain", "off", "on"))
    assert_same(plain, off)
    assert any(not torch.equal(value, on[name]) for name, value in plain.items())


def test_a_run_finds_its_images_from_any_folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", np.zeros((20, 8, 8), np.uint8))
    monkeypatch.chdir(tmp_path)
    train(tiny("data.source=folder", "data.path=a.npz", "data.holdout=0.2"), tmp_path / "run", CPU, max_images=32)
    monkeypatch.chdir("/")
    assert train(resumed_config(tmp_path / "run", []), tmp_path / "run", CPU, resume=True).why == "finished"


def test_what_was_left_out_is_said_and_logged(tmp_path):
    from tests.data.makers import image_folder, pixels

    folder = image_folder(tmp_path / "photos", pixels(20, 8, 1))
    (folder / "000003.png").write_bytes(b"")
    said = []

    class Listener(Reporter):
        def say(self, text):
            said.append(text)

    config = tiny("data.source=folder", f"data.path={folder}", "data.skip_bad=true", "train.images=32")
    train(config, tmp_path / "run", CPU, reporter=Listener())
    assert any("000003.png" in line for line in said)
    assert "000003.png" in read(RunFolder(tmp_path / "run").log)[0]["data"]["notes"][0]
