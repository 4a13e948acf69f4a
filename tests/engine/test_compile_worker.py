import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dualmcmc.engine import compile_worker, compiler
from dualmcmc.engine.compilation import _compile
from dualmcmc.engine.compile_worker import Job, compile_in_parallel
from dualmcmc.engine.compiler import make_compiler
from dualmcmc.engine.executor import Executor, Mode
from dualmcmc.engine.plan import ExecutionPlan, set_precision
from dualmcmc.utils.progress import no_progress

CPU = torch.device("cpu")


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(compile_worker, "cpu_count", lambda: 4)
    monkeypatch.setattr(compile_worker, "MEMORY_PER_WORKER", 1)


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own, which PyTorch does not cache by default."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))  # cannot be pickled
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return Doubled.apply(self.norm(self.linear(x)).relu()).sum(1)


def test_takes_from_the_cache_what_other_processes_have_compiled(four_cores, monkeypatch, tmp_path, restored_precision):
    """In every mode, with the same results as without compilation; the next run finds all and starts no process."""
    set_precision(ExecutionPlan(True, "float32", CPU))  # the cache distinguishes a setting from the same default
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "CACHE_IS_OURS", False)
    net = Energy()
    x = torch.randn(5, 3)

    def compiled() -> Executor:
        torch._dynamo.reset()
        counters.clear()
        executor = Executor(net, compiler=make_compiler(CPU, True))
        assert _compile([executor], [(executor, mode, x) for mode in Mode], True, no_progress) is None
        assert counters["aot_autograd"]["autograd_cache_hit"] == len(Mode)
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
        return executor

    executor = compiled()
    with executor.frozen():
        leaf = x.clone().requires_grad_()
        ours = torch.autograd.grad(executor(leaf).sum(), leaf)[0]
    with torch.no_grad(), Executor(net).frozen() as plain, torch.enable_grad():
        leaf = x.clone().requires_grad_()
        assert torch.allclose(ours, torch.autograd.grad(plain(leaf).sum(), leaf)[0], atol=1e-6)
    monkeypatch.setattr(compile_worker, "_Workers", lambda count: pytest.fail("nothing is new"))
    compiled()


@dataclass
class Scripted:
    """A job that runs `code`."""

    folder: Path
    name: str
    code: str = ""
    portable: bool = True
    device: torch.device = CPU

    @property
    def marker(self) -> Path:
        return self.folder / f"{self.name}.marker"

    def run(self) -> None:
        exec(self.code)
        (self.folder / self.name).write_text(f"{os.getpid()} {sys.path}")

    def mark(self) -> None:
        self.marker.touch()


def test_order_and_markers(four_cores, tmp_path, monkeypatch):
    """What is cached or cannot be sent comes first; what fails in a process is left to the caller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.marker").touch()
    codes = {"fails": "1 / 0", "dies": "os._exit(3)", "known": "1 / 0", "prints": "os.write(1, b'..')", "good": ""}
    jobs = [Scripted(tmp_path, name, code) for name, code in codes.items()]
    jobs += [Scripted(tmp_path, "local", portable=False), Scripted(tmp_path, "stuck", lambda: None)]  # not picklable
    order = []
    for index in compile_in_parallel(jobs):
        assert not jobs[index].marker.exists() or jobs[index].name == "known"
        order.append(index)
    assert order[:2] == [2, 5]
    assert sorted(order) == list(range(7))
    assert all(job.marker.exists() for job in jobs)
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ""} == {"prints", "good"}
    pid, paths = (tmp_path / "good").read_text().split(" ", 1)
    assert int(pid) != os.getpid()
    assert all(repr(path) in paths for path in sys.path if path)
    assert "''" not in paths  # nothing is imported from the current folder
    assert repr(str(tmp_path)) not in paths


def test_no_processes_without_cores_memory_or_several_jobs(four_cores, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_worker, "_Workers", lambda count: pytest.fail(f"{count} workers"))
    jobs = [Scripted(tmp_path, name) for name in "abc"]
    assert list(compile_in_parallel(jobs[:1])) == [0]
    assert list(compile_in_parallel([])) == []
    for name, value in (("cpu_count", lambda: 3), ("MEMORY_PER_WORKER", 10**15)):
        with monkeypatch.context() as patch:
            patch.setattr(compile_worker, name, value)
            assert list(compile_in_parallel([Scripted(tmp_path, f"{name}{k}") for k in range(3)])) == [0, 1, 2]
    with monkeypatch.context() as patch, pytest.raises(pytest.fail.Exception, match="2 workers"):
        list(compile_in_parallel([Scripted(tmp_path, f"new{k}") for k in range(3)]))


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


ENDLESS = "(self.folder / 'pid').write_text(str(os.getpid())); time.sleep(600)"


def test_processes_end_with_the_caller_s_interest(four_cores, tmp_path):
    jobs = [Scripted(tmp_path, "quick"), Scripted(tmp_path, "endless", ENDLESS)]
    with closing(compile_in_parallel(jobs)) as order:
        assert next(order) == 0
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert not jobs[0].marker.exists()  # the caller did not come back for more


def test_processes_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from dualmcmc.engine import compile_worker; from tests.engine.test_compile_worker import ENDLESS, Scripted\n"
        "compile_worker.cpu_count, compile_worker.MEMORY_PER_WORKER = lambda: 4, 1\n"
        "jobs = [Scripted(Path(sys.argv[1]), 'endless', ENDLESS), Scripted(Path(sys.argv[1]), 'b')]\n"
        "for _ in compile_worker.compile_in_parallel(jobs): pass\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_marker_depends_on_all_that_is_compiled():
    def marker(net=None, dtype=torch.float32, mode=Mode.CHAIN, x=None, deterministic=True) -> Path:
        executor = Executor(nn.Sequential(nn.Conv2d(1, 2, 3)) if net is None else net, dtype)
        return Job.of(executor, mode, torch.zeros(2, 1, 4, 4) if x is None else x, deterministic).marker

    others = [
        marker(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1))),
        marker(dtype=torch.bfloat16),
        marker(mode=Mode.TRAIN),
        marker(x=torch.zeros(3, 1, 4, 4)),
        marker(deterministic=False),
    ]
    assert marker() == marker()
    assert len({marker(), *others}) == 6
