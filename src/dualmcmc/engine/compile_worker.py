"""Compilation in parallel processes: each compiles one part of what a run needs, for PyTorch's cache on disk.

The compiler uses little more than one core. A process that asks it for the same part later finds it in the cache.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from dualmcmc.engine.compiler import cache_path, caches_compiled_code, caching, make_compiler
from dualmcmc.engine.executor import Arguments, Executor, Mode, trigger
from dualmcmc.engine.layers import BareLayers
from dualmcmc.utils.device import NumericSettings, available_memory, cpu_count, device_name

CORES_PER_WORKER = 2
MEMORY_PER_WORKER = 3 * 2**30  # bytes of RAM: PyTorch, and on a CPU one evaluation of the network
GPU_MEMORY_PER_WORKER = 6 * 2**30  # bytes: the CUDA context, and one evaluation
WORKER_VARIABLE = "DUALMCMC_COMPILE_WORKER"  # set in a worker, which starts none


@dataclass(frozen=True)
class Job:
    """The compilation of a network for one mode and batch size, as data that another process can receive."""

    layers: BareLayers
    mode: Mode
    arguments: Arguments  # without storage
    device: torch.device
    deterministic: bool
    settings: NumericSettings

    @classmethod
    def of(cls, executor: Executor, mode: Mode, x: Tensor, deterministic: bool) -> Job:
        """The job of compiling `executor` for `mode` and inputs like `x`."""
        weights, buffers, x = executor.arguments(mode, x)
        arguments = _like(weights, "meta"), _like(buffers, "meta"), _zeros_like(x, "meta")
        return cls(executor.bare(mode), mode, arguments, x.device, deterministic, NumericSettings.current())

    def run(self) -> None:
        """Compile."""
        self.settings.apply()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        weights, buffers, x = self.arguments
        arguments = _like(weights, self.device), _like(buffers, self.device), _zeros_like(x, self.device)
        with caching():
            trigger(make_compiler(self.device, self.deterministic)(self.layers.function()), self.mode, arguments)

    @property
    def portable(self) -> bool:
        """Whether another process can import the classes of the layers."""
        modules = {type(layer).__module__ for layer in self.layers.module.modules()}
        specs = [getattr(sys.modules.get(name), "__spec__", None) for name in modules]
        return "__main__" not in modules and not any(getattr(spec, "_initializing", False) for spec in specs)

    @property
    def marker(self) -> Path:
        """A file that exists if this was probably compiled before. If it is wrong, starting takes longer."""
        classes = [(name, type(layer).__qualname__) for name, layer in self.layers.module.named_modules()]
        sources = sorted({_source(type(layer)) for layer in self.layers.module.modules()})
        weights, buffers, x = self.arguments
        tensors = [(name, tuple(value.shape), value.dtype) for name, value in [*weights.items(), *buffers.items()]]
        network = classes, sources, tensors, self.layers.dtype
        conditions = self.mode, tuple(x.shape), self.deterministic, self.settings
        versions = torch.__version__, device_name(self.device)
        name = hashlib.sha256(repr((network, conditions, versions)).encode()).hexdigest()
        return cache_path() / "dualmcmc" / name

    def mark(self) -> None:
        """Create the marker."""
        with suppress(OSError):  # of a cache that is read-only or full
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            self.marker.touch()


def _source(kind: type) -> tuple[str, int]:
    """The file that defines a class, and when it was last changed."""
    try:
        file = inspect.getfile(kind)
        return file, os.stat(file).st_mtime_ns
    except (OSError, TypeError):
        return "", 0


def _like(tensors: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: _zeros_like(tensor, device) for name, tensor in tensors.items()}


def _zeros_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of this type, shape and layout."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def compile_in_parallel(jobs: Sequence[Job]) -> Generator[int, None, None]:
    """Compile jobs in other processes; yields the index of each when it is the caller's turn.

    The caller compiles it too, and then asks for the next. That is fast if the job is in the cache by then. What was
    compiled before, or cannot be sent, comes first; without enough jobs, cores or memory there are no processes. They
    end with the generator.
    """
    payloads = {index: payload for index, job in enumerate(jobs) if (payload := _payload(job)) is not None}
    with ExitStack() as cleanup:
        order: Iterable[int] = range(len(jobs))
        if count := _worker_count(len(payloads), jobs[0].device if jobs else None):
            workers = cleanup.enter_context(_Workers(count))
            order = chain((index for index in order if index not in payloads), workers.start(payloads))
        for index in order:
            yield index
            jobs[index].mark()


def _payload(job: Job) -> bytes | None:
    """What a worker receives; None if it should not, or cannot, compile this."""
    try:
        return pickle.dumps(job) if job.portable and not job.marker.exists() else None
    except Exception:  # a caller's modules may contain anything
        return None


def _worker_count(jobs: int, device: torch.device | None) -> int:
    """The number of processes; 0 unless there are at least two."""
    if jobs < 2 or WORKER_VARIABLE in os.environ or not caches_compiled_code():
        return 0
    if torch.distributed.is_initialized():  # the code of processes that train together communicates
        return 0
    limits = [jobs, cpu_count() // CORES_PER_WORKER, available_memory() // MEMORY_PER_WORKER]
    if device is not None and device.type == "cuda":
        limits.append(available_memory(device) // GPU_MEMORY_PER_WORKER)
    return min(limits) if min(limits) > 1 else 0


class _Workers:
    """At most `count` processes that run jobs. The end of the block ends them, whatever they are doing."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)  # a thread per worker
        self._thread = threading.local()
        self._workers: list[_Worker] = []
        self._stopped = False
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), WORKER_VARIABLE: "1"}
        self._environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cpu_count() // count)), **os.environ}
        self._environment |= {"PYTHONPATH": _import_paths(), **threads}

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()

    def start(self, jobs: Mapping[int, bytes]) -> Iterator[int]:
        """Run the jobs: the key of each as it ends."""
        futures = {self._pool.submit(self._run, job): key for key, job in jobs.items()}
        return (futures[future] for future in as_completed(futures))

    def _run(self, job: bytes) -> None:
        if getattr(self._thread, "worker", None) is None:
            worker = self._thread.worker = _Worker(self._environment)
            self._workers.append(worker)
            if self._stopped:
                worker.kill()
        if not self._thread.worker.run(job):
            self._thread.worker = None


def _import_paths() -> str:
    """Where a worker imports from: a caller's networks may come from anywhere this process imports from."""
    paths = []
    for path in sys.path:
        if isinstance(path, str):  # Python ignores the rest
            with suppress(OSError):  # the current folder may be gone
                paths.append(path or os.getcwd())
    return os.pathsep.join(paths)


class _Worker:
    """A process that runs jobs, one after the other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        replies, write_end = os.pipe()
        self._replies = os.fdopen(replies, "rb", buffering=0)
        # -P: nothing is imported from the current folder unless this process does so too.
        command = [sys.executable, "-P", "-c", "from dualmcmc.engine.compile_worker import main; main()"]
        try:
            self._process = subprocess.Popen(
                [*command, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[write_end],
                start_new_session=True,  # Ctrl-C is for this process; a group of its own, with its compilers
            )
        finally:
            os.close(write_end)

    def run(self, job: bytes) -> bool:
        """Run a job; false if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job)
            self._process.stdin.flush()
            return bool(self._replies.read(1))
        except OSError:
            return False

    def kill(self) -> None:
        """End the process and those it has started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end."""
        with suppress(OSError):
            self._process.communicate()
        self._replies.close()


def main() -> None:
    """Run the jobs on standard input, and write a byte after each to the file descriptor that is the argument."""
    replies = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    while True:
        with suppress(Exception):  # the process that needs this part will report it
            jobs.get().run()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # others need the memory
        replies.write(b".")


def _receive(jobs: queue.SimpleQueue[Job]) -> None:
    """Read jobs; at the end of the input nobody needs this process any more, whatever it is doing."""
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))
    finally:
        os.killpg(0, signal.SIGKILL)
