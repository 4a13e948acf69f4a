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

from dualmcmc import cli, settings
from dualmcmc.config import Config
from dualmcmc.engine.loop import train
from dualmcmc.engine.progress import Reporter
from dualmcmc.nets import Trio

LONG = os.environ.get("DUALMCMC_FAULTS") == "long"  # the long form of tests/faults and tests/security: `make faults`
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
    """`digits` on networks small enough to train in a second."""
    return settings.load_config("digits", [*TINY, *overrides])


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the test's own: what the machine has must not count."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DUALMCMC_DATA", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _signals_reach_children() -> None:
    """What a shell ignores for its background jobs, and nohup, their children would ignore too."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tiny run; tests read it and leave it as it is."""
    out = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny(), out, torch.device("cpu"), reporter=Reporter())
    return out


@pytest.fixture
def run_folder(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the trained tiny run that a test may write into."""
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
    """The command as a person calls it: its exit code and what it printed."""

    def run(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["dualmcmc", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Answer(int(ended.value.code or 0), printed.out, printed.err)

    return run


def assert_refused(answer: Answer, *words: str) -> None:
    """One clear line on standard error, exit code 2, nothing on standard output."""
    assert answer.code == 2, answer
    assert answer.out == ""
    lines = answer.err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile that traces all but makes no machine code: the same graphs in a hundredth of the time."""
    import torch._dynamo

    from dualmcmc.engine import accelerate

    def compiler(device: torch.device, repeatable: bool) -> Callable:
        torch._dynamo.config.recompile_limit = 64
        return lambda layers: torch.compile(layers, dynamic=False, fullgraph=True, backend="aot_eager")

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(accelerate, "_compiler", compiler)


@pytest.fixture
def restored_precision() -> Iterator[None]:
    """What float32 may do on CUDA, put back afterwards."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def nothing_plain(nets: Trio) -> Iterator[None]:
    """While active, layers that were not compiled refuse to run."""

    def refuse(*given: object) -> None:
        pytest.fail("not compiled ahead")

    before = [(net, net._plain) for net in nets.children()]
    for net, _ in before:
        net._plain = (refuse, refuse)
    yield
    for net, plain in before:
        net._plain = plain
