"""Several processes on one machine, connected by gloo: they train as one process does, and end together."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dualmcmc.engine import ddp, distributed
from dualmcmc.engine.distributed import SINGLE_PROCESS
from dualmcmc.engine.log import read_log
from dualmcmc.engine.resume import resumed_config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trainer import train
from dualmcmc.engine.watchdog import Watchdog
from dualmcmc.utils.errors import UserError
from tests.conftest import LONG, TINY
from tests.engine.distributed_work import impatient_command, rank_work, slow_work, work
from tests.processes import Child, command, free_port, killed_at_the_end, launch, rank_environment

pytestmark = pytest.mark.xdist_group("processes")  # one worker: they share what is slow to start
COUNTS = (2, 4) if LONG else (2,)
ROOT = Path(__file__).parents[2]
# BatchNorm cancels these biases: their gradient is a rounding error, which Adam scales up
CANCELLED = re.compile(r"(conv\d|shortcut)\.bias|running_mean")
NOT_TRAINED = ("seconds", "iterations_per_second")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folders of the same work done by one process and by several."""
    folders = {count: tmp_path_factory.mktemp(f"by{count}") for count in (1, *COUNTS)}
    launched = [launch(count, rank_work, folders[count]) for count in COUNTS]
    torch.set_num_threads(1)
    work(folders[1], SINGLE_PROCESS)
    for ranks in launched:
        assert [rank.wait() for rank in ranks] == [0] * len(ranks), [rank.err for rank in ranks]
    return folders


def curve(folder):
    """The statistics of every iteration."""
    return [
        {name: value for name, value in entry.items() if isinstance(value, float) and name not in NOT_TRAINED}
        for entry in read_log(RunFolder(folder).log)
        if entry["kind"] == "train"
    ]


def assert_close(ours, expected, skip=None):
    """Weights, averages and spectral norms to rounding, random states exactly."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("rng."):
            assert torch.equal(ours[name], value), name
        elif name.startswith(("nets.", "ema.", "memory.")) and not (skip and skip.search(name)):
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize(
    "run", ["simple", "second", "synced", "custom", "triangle", "no-mcmc", "persistent", "improved-cd", "abp", "rae"]
)
@pytest.mark.parametrize("count", COUNTS)
def test_number_of_processes_does_not_change_the_run(done, run, count):
    one, several = curve(done[1] / run), curve(done[count] / run)
    assert len(one) == len(several) == 3
    for ours, expected in zip(several, one, strict=True):
        assert ours == pytest.approx(expected, rel=2e-3, abs=2e-5)
    states = [load_file(RunFolder(done[n] / run).latest_state()) for n in (count, 1)]
    assert_close(*states, skip=CANCELLED if run == "synced" else None)


@pytest.mark.parametrize("run", ["own noise", "local batchnorm"])
def test_number_of_processes_changes_the_run_if_settings_say_so(done, run):
    one, two = (curve(done[count] / run) for count in (1, 2))
    assert one[0]["reconstruction_mse"] != pytest.approx(two[0]["reconstruction_mse"], rel=1e-4)
    assert one[0]["reconstruction_mse"] == pytest.approx(two[0]["reconstruction_mse"], rel=0.5)


@pytest.mark.parametrize("count", COUNTS)
def test_samples_and_metrics_are_the_same(done, count):
    with np.load(done[1] / "samples.npz") as one, np.load(done[count] / "samples.npz") as several:
        for name in ("generator", "revised"):
            assert one[name].shape == several[name].shape
            assert (np.abs(one[name].astype(int) - several[name]) <= 1).all()  # weights differ by rounding
    one, several = (json.loads((done[n] / "numbers.json").read_text()) for n in (1, count))
    for kind in ("generator", "ebm"):
        assert len(one[kind]) >= 2
        assert several[kind] == pytest.approx(one[kind], rel=1e-3, abs=0.02)
    for start, numbers in one["reconstruction"].items():
        assert several["reconstruction"][start] == pytest.approx(numbers, rel=1e-3)


def test_resumed_run_of_two_processes_is_exact(done):
    whole, parts = (load_file(RunFolder(done[2] / name).latest_state()) for name in ("simple", "parts"))
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


def test_run_of_two_processes_resumes_in_one(done, tmp_path):
    folder = Path(shutil.copytree(done[2] / "stopped", tmp_path / "run"))
    assert train(resumed_config(folder, []), folder, "cpu", resume=True).processes == 1
    assert_close(*(load_file(RunFolder(run).latest_state()) for run in (folder, done[1] / "simple")))


def test_error_ends_all_and_rank_0_reports_it(done):
    first, second = (json.loads((done[2] / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert "train.batch=15 is not divisible by 2 processes" in first["error"]
    assert (second["error"], second["exit"]) == (None, 2)
    assert not (done[2] / "invalid").exists()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_no_thread_outlives_the_process_group(done):
    """It could abort the process while the interpreter shuts down."""
    for rank in (0, 1):
        found = json.loads((done[2] / f"rank{rank}.json").read_text())
        assert found["threads"] > 0
        assert found["threads_after_closing"] == 0


def slurm(rank):
    """What srun sets for two tasks on one machine."""
    return {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}  # fmt: skip


def check_launch(out, printed, messages):
    """Rank 0 alone has printed the result of `train --json`, without warnings."""
    result = json.loads(printed)
    assert (result["images"], result["processes"]) == (32, 2)
    assert "2 processes on 1 machine" in messages
    assert "Warning" not in messages
    (start,) = [entry for entry in read_log(RunFolder(out).log) if entry["kind"] == "start"]
    assert start["processes"] == 2


def short_training(out):
    return ["train", "digits", *TINY, "train.images=32", "--device", "cpu", "--json", "--out", str(out)]


def test_srun(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [Child(command, *short_training(tmp_path / "run"), **address, **slurm(rank)) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert ranks[1].out == ""
    check_launch(tmp_path / "run", ranks[0].out, ranks[0].err + ranks[1].err)


BIN = Path(sys.executable).parent
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dualmcmc"],
    "fabric run": [BIN / "fabric", "run", "--devices=2", "--accelerator=cpu", BIN / "dualmcmc"],
}


@pytest.mark.skipif(not LONG, reason="`make faults`")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    words = [*LAUNCHERS[launcher], *short_training(tmp_path / "run")]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_launch(tmp_path / "run", done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("environment", "rank", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "1", "RANK": "5", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 5, (4, 2)),
        ({**slurm(1)}, 1, (2, 1)),
        ({**slurm(3), "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "2"}, 3, (3, 2)),
    ],
)
def test_topology(monkeypatch, environment, rank, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed.is_launched()
    assert distributed.env_rank() == rank
    topology = ddp._topology(torch.device("cpu"))
    assert (topology["devices"], topology["num_nodes"]) == expected
    monkeypatch.setenv("LT_CLI_USED", "1")  # `fabric run` has set all but the accelerator
    assert ddp._topology(torch.device("cpu")) == {"accelerator": "cpu"}


def test_batch_script_is_not_launched(monkeypatch):
    """SLURM sets variables there too, but srun has not started the processes."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert not distributed.is_launched()
    assert ddp.init_distributed("cpu") is SINGLE_PROCESS
    assert distributed.env_rank() == 0


def test_launcher_assigns_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="the launcher assigns one device per process"):
        ddp.connect("cuda:1")


def error_line(ranks):
    """The one error that all processes together have printed."""
    messages = "".join(rank.err for rank in ranks)
    assert "Traceback" not in messages
    (line,) = [line for line in messages.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [(["train", "digits", "train.batch=15"], "train.batch=15"), (["report", "RUN"], "'report' runs in one process")],
)
def test_error_is_printed_once(tmp_path, words, message):
    ranks = launch(2, command, *words, "--device", "cpu", "--out", tmp_path / "out")
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert message in error_line(ranks)
    assert not (tmp_path / "out").exists()


@contextmanager
def endless_training(out, function=command):
    """Two processes that have begun to train."""
    words = ["train", "digits", *TINY, "train.images=100000000", "train.save_every=32", "--device", "cpu"]
    ranks, folder = launch(2, function, *words, "--out", out), RunFolder(out)
    with killed_at_the_end(*ranks):
        deadline = time.monotonic() + 120
        while not (folder.has_states() and int(folder.latest_state().stem) > 0):
            assert all(rank.running for rank in ranks), [rank.err for rank in ranks]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield ranks


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_process_ends_the_others(tmp_path, victim):
    with endless_training(tmp_path / "run") as ranks:
        ranks[victim].kill()
        assert ranks[1 - victim].wait() == 4
        ranks[victim].wait()
    assert "another of the 2 processes was lost" in error_line(ranks)
    images = int(RunFolder(tmp_path / "run").latest_state().stem)
    config = resumed_config(tmp_path / "run", [])
    assert train(config, tmp_path / "run", "cpu", resume=True, max_images=images + 16).images == images + 16


@pytest.mark.parametrize("signalled", [(0, 1), (1,)], ids=str)
def test_signal_saves_once_and_stops_all(tmp_path, signalled):
    with endless_training(tmp_path / "run") as ranks:
        for rank in signalled:
            os.kill(ranks[rank].pid, signal.SIGTERM)
        assert [rank.wait() for rank in ranks] == [143, 143], [rank.err for rank in ranks]
    folder = RunFolder(tmp_path / "run")
    last = read_log(folder.log)[-1]
    assert (last["kind"], last["reason"]) == ("stop", "SIGTERM")
    assert int(folder.latest_state().stem) == last["images"]


def wait_until(condition, ranks):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, [rank.err for rank in ranks]
        time.sleep(0.05)


def alone(rank, port, **environment):
    """One of two processes; nobody starts the other."""
    words = ["train", "--device", "cpu", "--out", "never"]
    return Child(impatient_command, *words, **rank_environment(rank, 2, port), **environment)


@pytest.mark.parametrize(
    ("rank", "number", "code"), [(0, signal.SIGTERM, 143), (1, signal.SIGINT, 130), (1, signal.SIGHUP, 129)]
)
def test_signal_ends_connecting(rank, number, code):
    port = free_port()
    child = alone(rank, port)
    missing = f"rank {1 - rank} of 2 processes at 127.0.0.1:{port}"
    with killed_at_the_end(child):
        wait_until(lambda: f"waiting for {missing}; giving up after 5 min\n" in child.err, [child])
        os.kill(child.pid, number)
        assert child.wait() == code
    last = child.err.splitlines()[-1]
    assert last.endswith(f"{number.name}: stopped while waiting for {missing}")
    assert "Traceback" not in child.err


def test_signal_ends_connecting_to_a_stalled_process():
    """It accepts the connection, but does not answer: PyTorch waits for that and runs no signal handler."""
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        child = alone(1, str(stalled.getsockname()[1]))
        with killed_at_the_end(child):
            wait_until(lambda: "waiting for rank 0" in child.err, [child])
            os.kill(child.pid, signal.SIGTERM)
            assert child.wait() == 143
    assert "SIGTERM: stopped while waiting for rank 0" in child.err.splitlines()[-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_connecting_gives_up(rank):
    child = alone(rank, free_port(), DUALMCMC_CONNECT_TIMEOUT="1")
    with killed_at_the_end(child):
        assert child.wait() == 2
    assert f"cannot connect the processes: waited 1 s for rank {1 - rank} of 2" in error_line([child])


@pytest.mark.parametrize("name", ["DUALMCMC_CONNECT_TIMEOUT", "DUALMCMC_STALL_TIMEOUT"])
@pytest.mark.parametrize("value", ["0", "soon", "nan", "inf", "-1"])
def test_invalid_timeout(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name}={value} is not a number of seconds"):
        Watchdog(0, 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_stalled_process_is_named_and_may_continue(tmp_path, victim):
    with endless_training(tmp_path / "run", impatient_command) as ranks:
        other, folder = ranks[1 - victim], RunFolder(tmp_path / "run")
        os.kill(ranks[victim].pid, signal.SIGSTOP)
        # On a busy machine "it is still working" may precede it.
        wait_until(lambda: "it does not respond; giving up after 10 min" in other.err, ranks)
        assert f"waiting for rank {victim} for " in other.err
        images = int(folder.latest_state().stem)
        os.kill(ranks[victim].pid, signal.SIGCONT)
        wait_until(lambda: int(folder.latest_state().stem) > images + 64, ranks)
        os.kill(other.pid, signal.SIGTERM)
        assert [rank.wait() for rank in ranks] == [143, 143]
    assert read_log(folder.log)[-1]["reason"] == "SIGTERM"


@pytest.mark.parametrize("victim", [0, 1])
def test_signal_ends_waiting_for_a_stalled_process(tmp_path, victim):
    with endless_training(tmp_path / "run", impatient_command) as ranks:
        other = ranks[1 - victim]
        os.kill(ranks[victim].pid, signal.SIGSTOP)
        wait_until(lambda: f"waiting for rank {victim} for " in other.err, ranks)
        os.kill(other.pid, signal.SIGTERM)
        assert other.wait() == 143
    assert f"SIGTERM: stopped while waiting for rank {victim}" in other.err.splitlines()[-1]
    assert "Traceback" not in other.err
    images = int(RunFolder(tmp_path / "run").latest_state().stem)
    config = resumed_config(tmp_path / "run", [])
    assert train(config, tmp_path / "run", "cpu", resume=True, max_images=images + 16).images == images + 16


@pytest.mark.parametrize("victim", [0, 1])
def test_stalled_process_is_given_up(tmp_path, victim, monkeypatch):
    monkeypatch.setenv("DUALMCMC_STALL_TIMEOUT", "3")
    with endless_training(tmp_path / "run", impatient_command) as ranks:
        os.kill(ranks[victim].pid, signal.SIGSTOP)
        assert ranks[1 - victim].wait() == 4
        ranks[victim].kill()
        ranks[victim].wait()
    assert f"rank {victim} of 2 processes did not respond for 3 s" in error_line(ranks)


def test_long_work_is_waited_for(tmp_path, monkeypatch):
    """However long it takes: a process that works still responds."""
    monkeypatch.setenv("DUALMCMC_STALL_TIMEOUT", "2.5")
    ranks = launch(2, slow_work, tmp_path / "done")
    with killed_at_the_end(*ranks):
        wait_until(lambda: ranks[1].err.count("waiting for rank 0") >= 4, ranks)  # after 0.5, 1, 2 and 4 s
        (tmp_path / "done").touch()
        assert [rank.wait() for rank in ranks] == [0, 0]
    assert "it is still working" in ranks[1].err
    assert "respond" not in ranks[1].err
    assert ranks[0].err == ""


def test_signal_while_another_process_works(tmp_path):
    """Before training there is nothing to save, so it ends at once, although the process group still waits."""
    port = free_port()
    worker = Child(slow_work, tmp_path / "done", **rank_environment(0, 2, port))
    code = f"from tests.engine.distributed_work import slow_work; slow_work({str(tmp_path / 'done')!r})"
    path = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with (
        killed_at_the_end(worker),
        subprocess.Popen(  # a whole interpreter: it is at exit that it could hang
            [sys.executable, "-c", code],
            env=os.environ | rank_environment(1, 2, port) | {"OMP_NUM_THREADS": "1"} | path,
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting,
    ):
        try:
            messages = next(line for line in waiting.stderr if "waiting for rank 0" in line)
            waiting.terminate()
            messages += waiting.communicate(timeout=60)[1]
        finally:
            waiting.kill()
    assert waiting.returncode == 143
    assert messages.splitlines()[-1] == "rank 1: SIGTERM: stopped while waiting for the other processes"
