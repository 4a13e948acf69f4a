"""Child processes that start in a fraction of a second: forked from a server that has imported torch and dualmcmc."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pytest", "sklearn.datasets", "torch.utils.tensorboard", "lightning_fabric", "dualmcmc.cli", "dualmcmc.engine.ddp",
     "dualmcmc.engine.trainer", "dualmcmc.tasks.evaluate", "dualmcmc.tasks.sample"]
)  # fmt: skip
_LAUNCHER = ("SLURM_", "LT_", "TORCHELASTIC_")  # prefixes of what launchers set


class Child:
    """A process that calls `function(*arguments)`."""

    def __init__(self, function: Callable, *arguments: Any, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for name in ("out", "err"):
            (Path(self._folder.name) / name).touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        task = function, arguments, kept | environment, Path(self._folder.name)
        self._process = _context.Process(target=_run, args=task, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = 120) -> int:
        """The exit code."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "still running"
        return self._process.exitcode

    @property
    def out(self) -> str:
        return (Path(self._folder.name) / "out").read_text()

    @property
    def err(self) -> str:
        return (Path(self._folder.name) / "err").read_text()


def _run(function: Callable, arguments: tuple, environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY), descriptor)
    torch.set_num_threads(1)
    function(*arguments)


def command(*words: object) -> None:
    """The command `dualmcmc`."""
    from dualmcmc import cli

    sys.argv = ["dualmcmc", *map(str, words)]
    cli.main()


def rank_environment(rank: int, count: int, port: str) -> dict[str, str]:
    """What torchrun would set for one of `count` processes."""
    return {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}  # fmt: skip


def launch(count: int, function: Callable, *arguments: Any) -> list[Child]:
    """`count` connected processes."""
    port = free_port()
    return [Child(function, *arguments, **rank_environment(rank, count, port)) for rank in range(count)]


def free_port() -> str:
    """A port outside the range from which the system assigns them to other processes."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


@contextmanager
def killed_at_the_end(*children: Child) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()
