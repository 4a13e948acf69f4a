"""Trackers run in threads: whatever they do, training ends, on time and with the same result."""

import json
import sys
import threading
import time

import pytest
import torch

from dualmcmc.engine import tracking
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trackers import Tracker
from dualmcmc.engine.tracking import Trackers, TrackerThread, check_trackers
from dualmcmc.engine.trainer import train
from dualmcmc.utils.errors import Diverged, UserError
from dualmcmc.utils.reporter import Reporter
from tests.conftest import assert_refused, tiny


class Recorder(Tracker):
    """Remembers its calls, and fails at one of them."""

    def __init__(self, fails_at="", **attributes):
        self.calls, self._fails_at = [], fails_at
        self.__dict__.update(attributes)

    def _record(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name == self._fails_at:
            raise ConnectionError("the server\nis gone")

    def stats(self, values, images):
        assert values["images"] == images
        self._record("stats", images)

    def image(self, name, pixels, images):
        assert pixels.dtype == torch.uint8
        self._record("image", name, images)

    def summary(self, values):
        self._record("summary", dict(values))

    def rewind(self, images):
        self._record("rewind", images)

    def close(self, failed):
        self._record("close", failed)


class Messages(Reporter):
    def __init__(self):
        self.lines = []

    def message(self, text):
        self.lines.append(text)


@pytest.fixture
def short_timeouts(monkeypatch):
    for name in ("OPEN_TIMEOUT", "CLOSE_TIMEOUT", "LATE", "NOTICE"):
        monkeypatch.setattr(tracking, name, 0.05)
    monkeypatch.setattr(tracking, "POLL", 0.01)


@pytest.fixture
def use(monkeypatch):
    """Have train.trackers=[wandb] open this instead."""
    monkeypatch.setattr(tracking, "is_installed", lambda name: True)

    def replace(make):
        monkeypatch.setattr(tracking, "WandB", make)

    return replace


def run(out, *overrides, **arguments):
    reporter = Messages()
    result = train(tiny("train.trackers=[wandb]", *overrides), out, "cpu", reporter=reporter, **arguments)
    return result, reporter.lines


def test_everything_is_forwarded(tmp_path, use):
    tracker = Recorder(location="here")
    use(lambda config, root, run_id: tracker)
    _, lines = run(tmp_path / "run")
    assert tracker.calls == [
        ("stats", 48), ("stats", 64), ("image", "samples", 64), ("stats", 96), ("stats", 128),
        ("image", "samples", 128), ("summary", {"stop_reason": "finished"}), ("close", False),
    ]  # fmt: skip
    assert "Weights & Biases: here" in lines
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_rollback_and_failure(tmp_path, use):
    tracker = Recorder()
    use(lambda config, root, run_id: tracker)
    with pytest.raises(Diverged):
        run(tmp_path, "guard.max_energy_gap=1e-9", "guard.on_divergence=rollback", "guard.max_rollbacks=1")
    diverged, rewound, rollbacks, again, closed = [call for call in tracker.calls if call[0] != "stats"]
    assert diverged[1]["diverged_at"] == 48
    assert "above guard.max_energy_gap" in diverged[1]["divergence"]
    assert again[1].keys() == diverged[1].keys()
    assert (rewound, rollbacks, closed) == (("rewind", 0), ("summary", {"rollbacks": 1}), ("close", True))


@pytest.mark.parametrize("fails_at", ["stats", "image", "summary"])
def test_failing_tracker_does_not_stop_the_run(tmp_path, finished_run, use, fails_at):
    tracker = Recorder(fails_at)
    use(lambda config, root, run_id: tracker)
    result, lines = run(tmp_path)
    assert result.stop_reason == "finished"
    assert tracker.calls[-2][0] == fails_at  # then it is closed, and not used any more
    assert tracker.calls[-1] == ("close", True)
    if fails_at == "stats":
        text = "Weights & Biases failed (the server is gone): the run continues without it"
        assert lines.count(text) == 1
        assert [entry["text"] for entry in read_log(tmp_path / "log.jsonl") if entry["kind"] == "note"] == [text]
    assert RunFolder(tmp_path).latest_state().read_bytes()
    a, b = (RunFolder(folder).snapshot for folder in (tmp_path, finished_run))
    assert_same_weights(a, b)


def assert_same_weights(a, b):
    from safetensors.torch import load_file

    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(1)])
def test_tracker_that_cannot_be_opened_does_not_stop_the_run(tmp_path, use, error):
    def fail(config, root, run_id):
        raise error

    use(fail)
    result, lines = run(tmp_path)
    assert result.stop_reason == "finished"
    assert f"Weights & Biases failed ({error}): the run continues without it" in lines


def test_bad_input_found_by_a_tracker_is_refused(tmp_path, use):
    def refuse(config, root, run_id):
        raise UserError("there is no API key.")

    use(refuse)
    with pytest.raises(UserError, match="there is no API key"):
        run(tmp_path)
    use(lambda config, root, run_id: Recorder())
    assert run(tmp_path)[0].stop_reason == "finished"  # once it is corrected


def test_tracker_that_hangs_is_abandoned(tmp_path, use, short_timeouts):
    """While it is opened, and at the end."""
    hang = threading.Event()
    late = Recorder()

    def open_late(config, root, run_id):
        hang.wait(60)
        return late

    use(open_late)
    result, lines = run(tmp_path / "a")
    assert result.stop_reason == "finished"
    assert "waiting for Weights & Biases, at most 0 s" in lines
    assert "Weights & Biases failed (no answer within 0 s): the run continues without it" in lines
    hang.set()
    for thread in threading.enumerate():
        if thread.name == "dualmcmc-Weights & Biases":
            thread.join(60)
    assert late.calls == [("close", True)]

    class HangsAtTheEnd(Recorder):
        def close(self, failed):
            threading.Event().wait()

    use(lambda config, root, run_id: HangsAtTheEnd())
    result, lines = run(tmp_path / "b")
    assert result.stop_reason == "finished"
    assert lines[-1] == "Weights & Biases did not receive everything (no answer within 0 s)"


def test_signal_ends_the_wait(tmp_path):
    thread = TrackerThread("Slow", lambda: threading.Event().wait())
    thread.wait_until_opened(time.monotonic(), pytest.fail, lambda: True)
    assert "signal" in thread.failure


def test_refusal_closes_the_other_trackers(tmp_path, monkeypatch, use):
    """Their runs elsewhere would seem to be in progress for ever."""
    tracker = Recorder()

    def refuse(config, root, run_id):
        raise UserError("no key")

    use(refuse)
    monkeypatch.setattr(tracking, "MLflow", lambda config, root, run_id: tracker)
    with pytest.raises(UserError, match="no key"):
        run(tmp_path, "train.trackers=[mlflow,wandb]")
    assert tracker.calls == [("close", True)]


def test_slow_tracker_is_dropped(monkeypatch):
    monkeypatch.setattr(tracking, "MAX_QUEUE", 3)
    go_on = threading.Event()
    thread = TrackerThread("Slow", Recorder)
    trackers = Trackers([thread])
    for _ in range(5):
        trackers.send(lambda tracker: go_on.wait(60))
    assert trackers.drop_failed() == ["Slow failed (it is 3 calls behind): the run continues without it"]
    assert trackers.drop_failed() == []
    go_on.set()
    trackers.close(False)


def test_ids_are_stored_and_used_by_a_resumed_run(tmp_path, use):
    ids = []

    def make(config, root, run_id):
        ids.append(run_id)
        return Recorder(id=run_id or "abc12")

    use(make)
    run(tmp_path, max_images=64)
    stored = tmp_path / "trackers.json"
    assert json.loads(stored.read_text()) == {"wandb": "abc12"}
    train(resumed_config(tmp_path, []), tmp_path, "cpu", resume=True)
    assert ids == [None, "abc12"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "7", "null", '{"wandb": 7}', '{"wandb": null}', '{"wandb": ""}', '{"wandb": "a b"}', '{"wandb": "."}',
        '{"wandb": "../up"}', '{"wandb": "a/b"}', '{"wandb": "a\\n"}', '{"wandb": "-x"}', f'{{"wandb": "{"a" * 65}"}}',
        '{"mlflow": "abc12", "server": "http://example.org"}', "[" * 4000, '{"a": 1' + "0" * 4080 + "}",
    ],
)  # fmt: skip
def test_ids_are_checked(tmp_path, text):
    folder = RunFolder(tmp_path)
    folder.trackers.write_text(text)
    assert tracking._read_ids(folder) == {}


def test_well_formed_ids_are_read(tmp_path):
    ids = {"wandb": "my-run_1", "mlflow": "0123456789abcdef" * 2}
    folder = RunFolder(tmp_path)
    assert tracking._read_ids(folder) == {}
    folder.trackers.write_text(json.dumps({**ids, "other": 1}))
    assert tracking._read_ids(folder) == ids


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_named_before_anything_is_written(tmp_path, call, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "run"
    answer = call("train", "digits", f"train.trackers=[tensorboard,{name}]", "--device", "cpu", "--out", out)
    assert_refused(answer, f"train.trackers={name} needs the package {name}: pip install 'dualmcmc[trackers]'")
    assert not out.exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_settings_in_the_run_folder_are_not_read(tmp_path, monkeypatch, name):
    """W&B reads wandb/settings, MLflow mlflow.db of the current folder; either could name somebody's server."""
    inside = tmp_path / "run" / "samples"
    inside.mkdir(parents=True)
    folder = RunFolder(tmp_path / "run")
    check_trackers((name,), folder)
    for current in (folder.root, inside):
        monkeypatch.chdir(current)
        with pytest.raises(UserError, match="change to another folder"):
            check_trackers((name,), folder)
        check_trackers(("tensorboard",), folder)


def test_none(tmp_path):
    config = tiny("train.trackers=[]", "train.images=16")
    result = train(config, tmp_path, "cpu", reporter=(reporter := Messages()))
    assert result.stop_reason == "finished"
    assert not (tmp_path / "tensorboard").exists()
    assert not any("TensorBoard" in line for line in reporter.lines)
