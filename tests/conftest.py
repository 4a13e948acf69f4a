from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.engine import compile_worker, log, plan
from dualmcmc.engine.trainer import train
from dualmcmc.nets import Trio

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no test reaches the Hub; read when its library is imported
LONG = os.environ.get("DUALMCMC_FAULTS") == "long"  # `make faults`: more repetitions, more combinations
TINY = [
    "nets.energy_width=4",
    "nets.generator_width=4",
    "nets.inference_width=4",
    "teaching.latent_dim=4",
    "teaching.x_chain.step_size=0.125",
    "teaching.x_chain.temperature=4e-6",
    "teaching.x_chain.clamp=null",
    "ema.energy=false",
    "teaching.x_chain.steps=2",
    "teaching.z_chain.steps=2",
    "sampling.steps=3",
    "train.batch=16",
    "train.images=128",
    "train.save_every=64",
    "train.sample_every=64",
    "train.log_every=3",
]


def tiny(*overrides: str) -> Config:
    """`digits` with tiny networks, trained in a fraction of a second."""
    return config_io.load_config("digits", [*TINY, *overrides])


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache folder, so that no test depends on what this machine has downloaded."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DUALMCMC_DATA", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_compile_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without parallel processes, in those that tests start too."""
    monkeypatch.setenv(compile_worker.WORKER_VARIABLE, "1")


@pytest.fixture(autouse=True, scope="session")
def _signals_reach_children() -> None:
    """Background jobs of a shell, and nohup, ignore these signals; children would inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _small_previews() -> Iterator[None]:
    """Encoding sample grids takes a third of a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "PREVIEW_COUNT", 4)
        yield


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tiny run, read-only."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny(), out, "cpu")
    return out


@pytest.fixture
def run_folder(finished_run: Path, tmp_path: Path) -> Path:
    """A writable copy of the trained tiny run."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run the command in this process: its exit code and output."""
    from dualmcmc import cli

    def run(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["dualmcmc", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Answer(int(ended.value.code or 0), printed.out, printed.err)

    return run


def assert_refused(answer: Answer, *words: str) -> None:
    """Exit code 2, one line on standard error that contains `words`, nothing on standard output."""
    assert answer.code == 2, answer
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that traces graphs but generates no code: the same graphs in a hundredth of the time."""
    import torch._dynamo

    def compiler(device: torch.device, deterministic: bool) -> Callable:
        torch._dynamo.config.recompile_limit = 64
        return lambda layers: torch.compile(layers, dynamic=False, fullgraph=True, backend="eager")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(plan, "make_compiler", compiler)


@pytest.fixture
def restored_precision() -> Iterator[None]:
    """Restores the tf32 flags."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def compiled_only(executors: Trio) -> Iterator[None]:
    """Fail if a layer runs that was not compiled ahead."""

    def fail(*_: object) -> None:
        pytest.fail("not compiled ahead")

    before = [(executor, executor._eager) for executor in executors.children()]
    for executor, _ in before:
        executor._eager = (fail, fail)
    yield
    for executor, eager in before:
        executor._eager = eager
