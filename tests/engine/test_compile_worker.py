import json
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

from dualmcmc.engine import compilation, compile_worker, compiler
from dualmcmc.engine.compilation import _compile
from dualmcmc.engine.compile_worker import Job, compile_in_parallel
from dualmcmc.engine.compiler import make_compiler
from dualmcmc.engine.executor import Executor, Mode
from dualmcmc.engine.plan import ExecutionPlan, set_precision
from dualmcmc.utils.progress import no_progress

CPU = torch.device("cpu")


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.delenv(compile_worker.WORKER_VARIABLE)
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

    def extra_repr(self):
        return str(self.linear.weight.shape[1])  # fails without weights


@pytest.fixture
def own_cache(monkeypatch, tmp_path, restored_precision):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "CACHE_IS_OURS", False)
    set_precision(ExecutionPlan(True, "float32", CPU))  # the cache distinguishes a setting from the same default


def test_takes_from_the_cache_what_other_processes_have_compiled(four_cores, own_cache, monkeypatch):
    """In every mode, with the same results as without compilation; the next run finds all and starts no process."""
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
        facts = {
            "pid": os.getpid(),
            "session": os.getsid(0),
            "paths": sys.path,
            "threads": os.environ["OMP_NUM_THREADS"],
        }
        (self.folder / self.name).write_text(json.dumps(facts))

    def mark(self) -> None:
        self.marker.touch()


def test_order_and_markers(four_cores, tmp_path, monkeypatch):
    """What is cached or cannot be sent comes first; what fails in a process is left to the caller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("not text"), 7])
    (tmp_path / "known.marker").touch()
    codes = {"fails": "1 / 0", "dies": "os._exit(3)", "known": "1 / 0", "prints": "os.write(1, b'..')", "good": ""}
    jobs = [Scripted(tmp_path, name, code) for name, code in codes.items()]
    jobs += [Scripted(tmp_path, "local", portable=False), Scripted(tmp_path, "stuck", lambda: None)]  # not picklable
    order = []
    for index in compile_in_parallel(jobs):
        assert not jobs[index].marker.exists() or jobs[index].name == "known"
        order.append(index)
    assert order[:3] == [2, 5, 6]
    assert sorted(order) == list(range(7))
    assert all(job.marker.exists() for job in jobs)
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ""} == {"prints", "good"}
    facts = json.loads((tmp_path / "good").read_text())
    assert os.getpid() != facts["pid"] == facts["session"] != os.getsid(0)  # Ctrl-C does not reach it
    assert facts["threads"] == "1"
    assert {path for path in sys.path if path and isinstance(path, str)} <= set(facts["paths"])
    assert not {"", str(tmp_path)} & set(facts["paths"])  # nothing is imported from the current folder


def test_jobs_outlive_a_process(four_cores, tmp_path):
    """The next job goes to a new process, not to the one that has just ended."""
    jobs = [
        Scripted(tmp_path, f"{kind}{k}", code) for k in range(3) for kind, code in (("dies", "os._exit(3)"), ("", ""))
    ]
    assert sorted(compile_in_parallel(jobs)) == list(range(6))
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ""} == {"0", "1", "2"}


def test_workers_start_no_workers(four_cores, tmp_path):
    code = (
        "from dualmcmc.engine import compile_worker; compile_worker.cpu_count = lambda: 64; "
        "assert compile_worker._worker_count(9, None) == 0"
    )
    list(compile_in_parallel([Scripted(tmp_path, "a", code), Scripted(tmp_path, "b")]))
    assert (tmp_path / "a").exists()


def test_networks_of_the_program_itself_are_not_sent(monkeypatch):
    def portable(net) -> bool:
        return Job.of(Executor(nn.Sequential(net)), Mode.CHAIN, torch.zeros(2, 3), True).portable

    assert portable(nn.Linear(3, 3))
    assert portable(Energy())
    with monkeypatch.context() as patch:  # still being imported, by a caller who trains at module level
        patch.setattr(sys.modules[__name__].__spec__, "_initializing", True, raising=False)
        assert not portable(Energy())
    monkeypatch.setattr(Energy, "__module__", "__main__")
    assert not portable(Energy())


def test_no_processes_without_cores_memory_or_several_jobs(four_cores, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_worker, "_Workers", lambda count: pytest.fail(f"{count} workers"))
    jobs = [Scripted(tmp_path, name) for name in "abc"]
    assert list(compile_in_parallel(jobs[:1])) == [0]
    assert list(compile_in_parallel([])) == []
    for name, value in (("cpu_count", lambda: 3), ("MEMORY_PER_WORKER", 10**15)):
        with monkeypatch.context() as patch:
            patch.setattr(compile_worker, name, value)
            assert list(compile_in_parallel([Scripted(tmp_path, f"{name}{k}") for k in range(3)])) == [0, 1, 2]
    for owner, name, value in (
        (compile_worker, "caches_compiled_code", lambda: False),
        (torch.distributed, "is_initialized", lambda: True),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert list(compile_in_parallel([Scripted(tmp_path, f"{name}{k}") for k in range(3)])) == [0, 1, 2]
    with monkeypatch.context() as patch:
        patch.setenv(compile_worker.WORKER_VARIABLE, "1")
        assert list(compile_in_parallel([Scripted(tmp_path, f"worker{k}") for k in range(3)])) == [0, 1, 2]
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


ENDLESS = (
    "child = subprocess.Popen(['sleep', '600']); "
    "(self.folder / 'pids').write_text(f'{os.getpid()} {child.pid}'); time.sleep(600)"
)


def test_processes_end_with_the_caller_s_interest(four_cores, tmp_path):
    jobs = [Scripted(tmp_path, "quick"), Scripted(tmp_path, "endless", ENDLESS)]
    with closing(compile_in_parallel(jobs)) as order:
        assert next(order) == 0
        wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    wait_until(lambda: not any(map(is_running, pids)))
    assert not jobs[0].marker.exists()  # the caller did not come back for more


def test_processes_end_when_their_parent_is_killed(tmp_path, monkeypatch):
    monkeypatch.delenv(compile_worker.WORKER_VARIABLE)
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from dualmcmc.engine import compile_worker; from tests.engine.test_compile_worker import ENDLESS, Scripted\n"
        "compile_worker.cpu_count, compile_worker.MEMORY_PER_WORKER = lambda: 4, 1\n"
        "jobs = [Scripted(Path(sys.argv[1]), 'endless', ENDLESS), Scripted(Path(sys.argv[1]), 'b')]\n"
        "for _ in compile_worker.compile_in_parallel(jobs): pass\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        wait_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    finally:
        parent.kill()
        parent.wait()
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    wait_until(lambda: not any(map(is_running, pids)))


def test_out_of_memory_beside_other_processes(monkeypatch):
    """They end, and the rest is compiled without them; if memory runs out again, that is an error."""
    net, x, ended = nn.Linear(3, 2), torch.zeros(2, 3), []

    def order(jobs):
        try:
            yield from range(len(jobs))
        finally:
            ended.append(len(compiled))

    compiled: list[Mode] = []

    def compile_ahead(mode, x):
        if mode is Mode.CHAIN and len(ended) < needed:
            raise torch.OutOfMemoryError
        compiled.append(mode)

    monkeypatch.setattr(compilation, "compile_in_parallel", order)
    executor = Executor(net)
    monkeypatch.setattr(executor, "compile_ahead", compile_ahead)
    tasks = [(executor, mode, x) for mode in (Mode.TRAIN, Mode.CHAIN, Mode.FROZEN)]
    needed = 1
    assert _compile([executor], tasks, True, no_progress) is None
    assert compiled == [Mode.TRAIN, Mode.CHAIN, Mode.FROZEN]
    assert ended == [1]
    ended.clear()
    needed = 2
    with pytest.raises(torch.OutOfMemoryError):
        _compile([executor], tasks, True, no_progress)


def job(net=None, dtype=torch.float32, mode=Mode.CHAIN, x=None, deterministic=True) -> Job:
    executor = Executor(nn.Sequential(nn.Conv2d(1, 2, 3)) if net is None else net, dtype)
    return Job.of(executor, mode, torch.zeros(2, 1, 4, 4) if x is None else x, deterministic)


def test_the_marker_depends_on_all_that_is_compiled(monkeypatch, restored_precision):
    markers = {
        job().marker,
        job(nn.Sequential(nn.Conv2d(1, 2, 1))).marker,
        job(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())).marker,
        job(dtype=torch.bfloat16).marker,
        job(mode=Mode.TRAIN).marker,
        job(x=torch.zeros(3, 1, 4, 4)).marker,
        job(deterministic=False).marker,
    }
    assert len(markers) == 7
    assert job().marker in markers
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    assert job().marker not in markers


def test_the_marker_depends_on_the_source(monkeypatch, tmp_path):
    source = tmp_path / "source.py"
    source.touch()
    monkeypatch.setattr(compile_worker.inspect, "getfile", lambda kind: str(source))
    before = job().marker
    assert job().marker == before
    os.utime(source, ns=(1, 1))
    assert job().marker != before
    source.unlink()
    assert job().marker.name  # of classes without a file too


def test_marker_in_an_unwritable_cache(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(compile_worker, "cache_path", lambda: tmp_path / "file")
    job().mark()
    assert not job().marker.exists()
