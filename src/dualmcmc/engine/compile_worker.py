"""Compilation in parallel processes: each compiles one part of what a run needs, for PyTorch's cache on disk.

The compiler uses little more than one core. A process that asks it for the same part later finds it in the cache.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import queue
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

from dualmcmc.engine.compiler import cache_path, caching, make_compiler
from dualmcmc.engine.executor import Arguments, Executor, Mode, trigger
from dualmcmc.engine.layers import BareLayers
from dualmcmc.utils.device import NumericSettings, available_memory, cpu_count, device_name

CORES_PER_WORKER = 2
MEMORY_PER_WORKER = 3 * 2**30  # bytes of RAM, mostly for PyTorch
GPU_MEMORY_PER_WORKER = 6 * 2**30  # bytes: its CUDA context, and one evaluation of a large network


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
        arguments = _like(weights, "meta"), _like(buffers, "meta"), _empty_like(x, "meta")
        return cls(executor.bare(mode), mode, arguments, x.device, deterministic, NumericSettings.current())

    def run(self) -> None:
        """Compile."""
        self.settings.apply()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        weights, buffers, x = self.arguments
        arguments = _like(weights, self.device), _like(buffers, self.device), _empty_like(x, self.device)
        with caching():
            trigger(make_compiler(self.device, self.deterministic)(self.layers.function()), self.mode, arguments)

    @property
    def portable(self) -> bool:
        """Whether another process can import the classes of the layers."""
        return all(type(layer).__module__ != "__main__" for layer in self.layers.module.modules())

    @property
    def marker(self) -> Path:
        """A file that exists if this was compiled before; if it is wrong, starting takes longer."""
        weights, buffers, x = self.arguments
        tensors = [(name, tuple(value.shape), value.dtype) for name, value in [*weights.items(), *buffers.items()]]
        versions = torch.__version__, device_name(self.device)
        parts = self.layers.module, self.layers.dtype, self.mode, tensors, x.shape, self.settings, versions
        name = hashlib.sha256(repr((*parts, self.deterministic)).encode()).hexdigest()
        return cache_path() / "dualmcmc" / name

    def mark(self) -> None:
        """Create the marker."""
        with suppress(OSError):  # of a cache that is read-only or full
            self.marker.parent.mkdir(parents=True, exist_ok=True)
            self.marker.touch()


def _like(tensors: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: _empty_like(tensor, device) for name, tensor in tensors.items()}


def _empty_like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of this type, shape and layout."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def compile_in_parallel(jobs: Sequence[Job]) -> Generator[int, None, None]:
    """Compile in other processes what was not compiled before; yields the index of each job as soon as it is cached.

    A job whose process failed is yielded too, and so are all, at once, if there are too few jobs, cores or memory for
    several processes. The caller compiles each, which is fast if it is in the cache, and then asks for the next.
    """
    new = {index: job for index, job in enumerate(jobs) if job.portable and not job.marker.exists()}
    count = _worker_count(len(new), jobs[0].device) if new else 0
    with ExitStack() as cleanup:
        order: Iterable[int] = range(len(jobs))
        if count > 1:
            order = chain(sorted(set(order) - set(new)), cleanup.enter_context(_Workers(count)).start(new))
        for index in order:
            yield index
            jobs[index].mark()


def _worker_count(jobs: int, device: torch.device) -> int:
    if torch.distributed.is_initialized():  # the code of processes that train together communicates
        return 0
    limits = [jobs, cpu_count() // CORES_PER_WORKER, available_memory() // MEMORY_PER_WORKER]
    if device.type == "cuda":
        limits.append(available_memory(device) // GPU_MEMORY_PER_WORKER)
    return min(limits)


class _Workers:
    """At most `count` processes that run jobs. The end of the block ends them, whatever they are doing."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count)  # a thread per process
        self._thread = threading.local()
        self._processes: list[subprocess.Popen] = []
        self._stopped = False
        # A caller's networks may come from anywhere; from the current folder (-P) only if this process imports from it.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._environment = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cpu_count() // count)), **os.environ}
        self._environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        self._pool.shutdown()
        for process in self._processes:
            process.communicate()

    def start(self, jobs: Mapping[int, Job]) -> Iterator[int]:
        """Run the jobs: the key of each as it ends."""
        futures = {self._pool.submit(self._run, job): key for key, job in jobs.items()}
        return (futures[future] for future in as_completed(futures))

    def _run(self, job: Job) -> None:
        process: subprocess.Popen | None = getattr(self._thread, "process", None)
        if process is None or process.poll() is not None:
            process = self._thread.process = self._start_process()
        # A caller's modules may be impossible to send, and a process may end: then there is nothing in the cache.
        with suppress(Exception):
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
            process.stdout.read(1)

    def _start_process(self) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from dualmcmc.engine.compile_worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
        self._processes.append(process)
        if self._stopped:
            process.kill()
        return process


def main() -> None:
    """Run the jobs that come in on standard input, and write a byte after each, until it is closed."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the compiler prints
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs,), daemon=True).start()
    while True:
        with suppress(Exception):  # the process that needs this part will report it
            jobs.get().run()
        replies.write(b".")


def _receive(jobs: queue.SimpleQueue[Job]) -> None:
    """Read jobs; at the end of the input nobody needs this process any more, whatever it is doing."""
    try:
        while True:
            jobs.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)
