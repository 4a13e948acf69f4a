"""The trackers with the real packages: W&B offline, MLflow with a local store, TensorBoard's event files."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dualmcmc import config_io
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trackers import WandB
from dualmcmc.engine.trainer import train
from dualmcmc.utils.errors import UserError
from tests.conftest import TINY, tiny
from tests.engine.test_tracking import Messages

ENDLESS = ["train.images=100000000", "train.save_every=64000", "train.sample_every=64000"]
VARIABLES = ("WANDB_", "MLFLOW_")


@pytest.fixture(autouse=True)
def local(monkeypatch, tmp_path_factory):
    """No network, no settings of this user, no telemetry, and nothing in the current folder."""
    folder = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(folder / "config"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """MLflow takes seconds to create the tables of a store."""
    from mlflow import MlflowClient

    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{store}")
    return store


@pytest.fixture
def store(empty_store, local):
    """An empty store where MLflow looks for it."""
    shutil.copy(empty_store, local / "mlflow.db")


def seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def assert_same_state(a, b):
    """Weights, moments, averages and all random generators: also the global ones of Python, NumPy and torch."""
    first, second = (load_file(RunFolder(folder).latest_state()) for folder in (a, b))
    assert first.keys() == second.keys()
    assert {"rng.torch", "rng.numpy", "rng.python"} <= first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_entries(out):
    return [entry for entry in read_log(out / "log.jsonl") if entry["kind"] == "train"]


def files_in(folder):
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*")}


def test_mlflow(tmp_path, store, local, monkeypatch):
    """Parameters, metrics, images, tags and status; a resumed run continues; the result is the same as without."""
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")  # off even so
    change = "optim.energy.lr=0.0002"
    seed()
    train(tiny("train.trackers=[]"), tmp_path / "plain", "cpu", max_images=64)
    train(resumed_config(tmp_path / "plain", [change]), tmp_path / "plain", "cpu", resume=True)
    seed()
    config, out = tiny("train.trackers=[mlflow]"), tmp_path / "my run"
    train(config, out, "cpu", max_images=64)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("dualmcmc").experiment_id])
    assert run.info.run_name == "my run"
    assert run.info.status == "FINISHED"
    assert run.data.tags["stop_reason"] == "max-images"
    assert json.loads((out / "trackers.json").read_text()) == {"mlflow": run.info.run_id}
    train(resumed_config(out, [change]), out, "cpu", resume=True)
    assert_same_state(out, tmp_path / "plain")

    (run,) = client.search_runs(["1"])
    assert run.data.tags["stop_reason"] == "finished"
    assert run.data.params.keys() == config_io.flatten(config).keys()
    assert run.data.params["preset"] == "digits"
    assert run.data.params["teaching.x_chain.steps"] == "2"
    assert run.data.params["optim.energy.lr"] == str(config.optim.energy.lr)  # a parameter cannot change
    assert run.data.tags["optim.energy.lr"] == "0.0002"
    logged = train_entries(out)
    assert {entry["images"] for entry in logged} == {48, 64, 96, 128}
    for name in ("energy_gap", "reconstruction_mse", "iteration"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in history] == [(e["images"], e[name]) for e in logged]
    images = [file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    assert sorted(path.split("+")[2] for path in images) == ["128", "64"]
    assert files_in(local) == {"mlflow.db", "mlruns"}
    assert not (out / "mlruns").exists()


def test_mlflow_settings(tmp_path, empty_store, local, monkeypatch):
    """Its environment variables apply; a run that its store does not know is started anew; a failed one is marked."""
    from mlflow import MlflowClient

    shutil.copy(empty_store, local / "other.db")
    store = f"sqlite:///{local / 'other.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    out = tmp_path / "run"
    train(tiny("train.trackers=[mlflow]", "train.images=64"), out, "cpu")
    (out / "trackers.json").write_text(json.dumps({"mlflow": "0" * 32}))
    with pytest.raises(ZeroDivisionError):
        train(resumed_config(out, ["train.images=128"]), out, "cpu", resume=True, on_log=lambda stats: 1 / 0)
    client = MlflowClient(store)
    second, first = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (first.info.status, second.info.status) == ("FINISHED", "FAILED")
    assert json.loads((out / "trackers.json").read_text()) == {"mlflow": second.info.run_id}
    assert files_in(local) == {"other.db", "mlruns"}


def test_mlflow_without_its_server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing answers there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    messages = Messages()
    result = train(tiny("train.trackers=[mlflow]", "train.images=64"), tmp_path, "cpu", reporter=messages)
    assert result.stop_reason == "finished"
    (line,) = (line for line in messages.lines if "MLflow" in line)
    assert line.startswith("MLflow failed (")
    assert "127.0.0.1" in line
    assert not (tmp_path / "trackers.json").exists()


def records(run):
    """The records of an offline W&B run: LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("*.wandb")
    content, position, parts, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, last
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(found):
    """What was logged, as dicts."""
    rows = [record.history for record in found if record.HasField("history")]
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]


@pytest.fixture
def wandb_ends():
    """Ends its service process."""
    yield
    import wandb

    wandb.teardown()


def test_wandb(tmp_path, wandb_ends):
    """Ctrl-C while W&B records: the run stops cleanly; resumed, it continues the same run, with the same weights."""
    out, plain = tmp_path / "my run", tmp_path / "plain"
    command = ["train", "digits", *TINY, *ENDLESS, "train.trackers=[wandb]", "--device", "cpu", "--out", str(out)]
    words = [sys.executable, "-m", "dualmcmc", *command]
    with subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not train_entries(out):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        printed = process.communicate()[1]
    assert process.returncode == 130, printed
    assert "Weights & Biases: offline in" in printed
    assert "failed" not in printed
    folder = RunFolder(out)
    folder.require_no_links()
    stopped = int(folder.latest_state().stem)
    assert read_log(folder.log)[-1]["reason"] == "SIGINT"
    (run,) = folder.wandb.iterdir()

    (folder.wandb / "settings").write_text("[default]\nbase_url = http://attacker.example\nproject = his\n")
    shutil.copytree(out, plain)
    total = f"train.images={stopped + 64}"
    train(resumed_config(out, [total]), out, "cpu", resume=True)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert handlers == [signal.default_int_handler, signal.SIG_DFL]
    train(resumed_config(plain, [total, "train.trackers=[]"]), plain, "cpu", resume=True)
    assert_same_state(out, plain)

    (again,) = [path for path in folder.wandb.iterdir() if path.is_dir() and path != run]
    run_id = json.loads(folder.trackers.read_text())["wandb"]
    logged = train_entries(out)
    sessions = records(run), records(again)
    rows = [row for found in sessions for row in history(found)]
    points = [(row["images"], row["energy_gap"]) for row in rows if "energy_gap" in row]
    assert points == [(entry["images"], entry["energy_gap"]) for entry in logged]
    assert [row["images"] for row in rows if "samples.path" in row] == [stopped, stopped + 64]
    for found, reason in zip(sessions, ("SIGINT", "finished"), strict=True):
        runs = [record.run for record in found if record.HasField("run")]
        assert {(entry.run_id, entry.project, entry.display_name) for entry in runs} == {(run_id, "dualmcmc", "my run")}
        assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0]
        summary = [item for record in found if record.HasField("summary") for item in record.summary.update]
        assert ("stop_reason", json.dumps(reason)) in [(item.key, item.value_json) for item in summary]
        assert ("*", "images") in [(record.metric.glob_name, record.metric.step_metric) for record in found]
        changes = [item for record in found if record.HasField("config") for item in record.config.update]
        settings = {item.key or item.nested_key[0]: item.value_json for item in changes}
        assert settings.keys() >= config_io.flatten(tiny()).keys()
        assert settings["preset"] == '"digits"'
    assert "attacker" not in "".join(path.read_text(errors="replace") for path in again.rglob("*") if path.is_file())


def test_wandb_without_api_key(tmp_path, local, monkeypatch, wandb_ends):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(local / "netrc"))
    with pytest.raises(UserError, match="has no API key: run 'wandb login', set WANDB_API_KEY, or record offline"):
        WandB(tiny(), tmp_path, None)
    assert not list(tmp_path.iterdir())


def test_tensorboard(tmp_path):
    """The points of log.jsonl; those of a state that is resumed from are hidden behind the repeated ones."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    train(tiny("train.save_every=1000000"), out, "cpu", max_images=64)
    config = resumed_config(out, ["train.save_every=64"])
    train(config, out, "cpu", resume=True)
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    logged = train_entries(out)
    points = [(point.step, point.value) for point in events.Scalars("energy_gap")]
    assert points == [(entry["images"], pytest.approx(entry["energy_gap"])) for entry in logged]
    assert [image.step for image in events.Images("samples")] == [64, 128]
