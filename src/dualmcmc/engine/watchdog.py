"""Waiting for the other processes: reports which one is awaited, stops on signals, and times out.

The main thread may be waiting inside PyTorch, where Python runs no signal handlers. A thread of its own therefore
watches it. Each process writes a heartbeat to torch.distributed's store; heartbeats are read only while waiting.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from dualmcmc.utils.errors import ProcessLost, UserError, sanitize
from dualmcmc.utils.progress import format_duration, print_line

CONNECT_TIMEOUT = "DUALMCMC_CONNECT_TIMEOUT", 300.0  # environment variables, and their defaults in seconds
STALL_TIMEOUT = "DUALMCMC_STALL_TIMEOUT", 600.0
NOTICE = 5.0  # seconds until the first message; then after twice the time
SLOW_NOTICE = 10.0  # the same, if those waited for respond
SILENT = 5.0  # seconds without a heartbeat
BEAT = 1.0  # seconds between two heartbeats
TICK = 0.2  # seconds between two looks at the main thread
PATIENCE = 1.5  # seconds for the main thread to end by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOWN_RANKS = 8


class Watchdog:
    """Watches whether this process waits for another.

    The main thread says when it may be waiting: `connecting`, `waiting`, or `mark` and `unmark`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._connect_timeout, self._stall_timeout = _seconds(*CONNECT_TIMEOUT), _seconds(*STALL_TIMEOUT)
        self._wait: _Wait | None = None  # of the main thread; None: it waits for nobody
        self._position = 0  # collectives of the host group begun so far, the same sequence on all ranks
        self._heard = [(b"", 0.0)] * size  # the newest heartbeat of each rank, and seconds of waiting since
        self._unanswered = 0.0  # seconds of waiting since the store answered
        self._lock = threading.Lock()  # of the two above
        self._store: Any = None
        self._signal: int | None = None
        self._exit_code: int | None = None
        self._no_beats, self._closed = threading.Event(), threading.Event()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._main_thread = threading.current_thread() is threading.main_thread()  # only there can signals be watched
        if self._main_thread:
            self._previous = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        atexit.register(self._exit)
        self._threads = [threading.Thread(target=self._watch, daemon=True)]
        self._threads[0].start()

    def stop_heartbeats(self) -> None:
        """All ranks do this before the first of them leaves, and with it perhaps the store."""
        self._no_beats.set()
        for thread in self._threads[1:]:
            thread.join(PATIENCE)

    def close(self) -> None:
        """Stop watching."""
        self.stop_heartbeats()
        self._closed.set()
        self._threads[0].join()
        self._store = None
        if self._main_thread:
            signal.set_wakeup_fd(self._previous)
        for descriptor in self._pipe:
            os.close(descriptor)
        if self._exit_code is None:
            atexit.unregister(self._exit)

    @contextmanager
    def connecting(self, host: str, port: int, is_host: bool) -> Iterator[None]:
        """Connect to all others through the store at this address; the rest of connecting follows inside.

        `is_host`: this process is the store.
        """
        where = f"at {sanitize(host)}:{port}"
        with self._waiting(_Wait(f"rank 0 of {self._size} processes {where}")) as wait:
            while not is_host and not _accepts(host, port):  # TCPStore would print a stack trace for each failure
                self._sleep()
            timeout = timedelta(seconds=self._connect_timeout + 60)  # the watchdog gives up before
            # multi_tenant: torch.distributed then uses the same store
            store = self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, is_host, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
            store.set(self._key(self._rank), "0 0")
            missing = list(range(self._size))
            while missing := [rank for rank in missing if not store.check([self._key(rank)])]:
                wait.who = f"{format_ranks(missing)} of {self._size} processes {where}"
                self._sleep()
            self._threads.append(threading.Thread(target=self._beat, daemon=True))
            self._threads[-1].start()
            self.mark()
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """One collective of the host group."""
        self._position += 1
        with self._waiting(_Wait()):
            yield

    def mark(self) -> None:
        """The main thread is about to start something that may wait for the other processes inside PyTorch."""
        self._wait = _Wait()

    def unmark(self) -> None:
        """The main thread does not wait any more."""
        self._wait = None

    def check(self) -> None:
        """Raise if it is time to stop waiting; called by the main thread while it waits."""
        wait = self._wait
        verdict = wait.verdict if wait is not None else None
        if verdict is None:
            return
        code, text = verdict
        if code == 2:
            raise UserError(text)
        self._exit_code = code
        raise ProcessLost(text) if code == 4 else SystemExit(code)

    @contextmanager
    def _waiting(self, wait: _Wait) -> Iterator[_Wait]:
        self._wait = wait
        try:
            yield wait
        except SystemExit as stopped:  # a signal
            if isinstance(stopped.code, int) and stopped.code - 128 in SIGNALS:
                self._exit_code = stopped.code
                verdict = wait.verdict
                self._print(verdict[1] if verdict else self._stopped(wait, stopped.code - 128))
            raise
        finally:
            self._wait = None

    def _sleep(self) -> None:
        time.sleep(TICK)
        self.check()

    def _watch(self) -> None:
        """The thread: decides every `TICK` seconds, and at once on a signal."""
        current, last, judged_at = None, time.monotonic(), math.inf
        while not self._closed.is_set():
            self._read_signal()
            now = time.monotonic()
            elapsed = min(now - last, 2 * TICK)  # time in which this process was itself suspended does not count
            last = now
            wait = self._wait
            with self._lock:
                if wait is not current:
                    self._unanswered, self._heard = 0.0, [(beat, 0.0) for beat, _ in self._heard]
                self._unanswered += elapsed
                self._heard = [(beat, seconds + elapsed) for beat, seconds in self._heard]
            current = wait
            if wait is None:
                continue
            wait.seconds += elapsed
            if wait.verdict is None:
                self._notify(wait)
                wait.verdict, judged_at = self._judge(wait), now
            elif now - judged_at > PATIENCE and wait is self._wait:  # the main thread is inside PyTorch
                self._end(*wait.verdict)

    def _read_signal(self) -> None:
        if select.select([self._pipe[0]], [], [], TICK)[0]:
            for number in os.read(self._pipe[0], 100):
                if number in SIGNALS:
                    self._signal = number

    def _judge(self, wait: _Wait) -> tuple[int, str] | None:
        """Whether to stop waiting, with which exit code, and why."""
        if wait.who:
            limit, reached, silent = self._connect_timeout, wait.seconds, True
        else:
            limit, silent = self._stall_timeout, bool(self._silent)
            reached = max((self._heard[rank][1] for rank in self._silent), default=0.0)
        if silent and self._signal is not None:
            return 128 + self._signal, self._stopped(wait, self._signal)
        if reached < limit:
            return None
        if wait.who:
            return 2, f"cannot connect the processes: waited {format_duration(limit)} for {wait.who}."
        return 4, (
            f"{format_ranks(self._silent)} of {self._size} processes did not respond for {format_duration(limit)}. "
            "Continue from the last saved state with --resume."
        )

    def _notify(self, wait: _Wait) -> None:
        """Say for whom this process waits, at growing intervals; of those that wait, only the lowest rank says it."""
        if wait.seconds < wait.notice:
            return
        if wait.who:
            text = f"waiting for {wait.who}; giving up after {format_duration(self._connect_timeout)}"
        else:
            silent = self._silent
            awaited = silent or (self._behind if wait.seconds >= SLOW_NOTICE else [])
            speaker = next((rank for rank in range(self._size) if rank not in awaited), 0)
            if not awaited or self._rank != speaker:
                return
            one = len(awaited) == 1
            state = (
                f"{'it does' if one else 'they do'} not respond; giving up after {format_duration(self._stall_timeout)}"
                if silent
                else f"{'it is' if one else 'they are'} still working"
            )
            text = f"waiting for {format_ranks(awaited)} for {format_duration(wait.seconds)}: {state}"
        wait.notice = 2 * wait.seconds
        self._print(text)

    @property
    def _silent(self) -> list[int]:
        """The ranks without a heartbeat for some time."""
        if self._unanswered >= SILENT:  # rank 0, or its launcher, is the store
            return [0]
        return [rank for rank, (_, seconds) in enumerate(self._heard) if seconds >= SILENT and rank != self._rank]

    @property
    def _behind(self) -> list[int]:
        """The ranks that have begun fewer collectives than this one: those with the fewest."""
        positions = [int(beat.split()[1]) if beat else self._position for beat, _ in self._heard]
        lowest = min(positions)
        return [rank for rank, position in enumerate(positions) if position == lowest < self._position]

    def _stopped(self, wait: _Wait, number: int) -> str:
        who = wait.who or (f"{format_ranks(self._silent)}: no response" if self._silent else "the other processes")
        return f"{signal.Signals(number).name}: stopped while waiting for {who}"

    def _print(self, text: str) -> None:
        print_line(f"{f'rank {self._rank}: ' if self._rank else ''}{text}")

    def _end(self, code: int, text: str) -> NoReturn:
        """End the process from here: the main thread cannot."""
        if sys.stderr.isatty():
            print_line("\033[?25h")  # a progress bar has hidden the cursor
        prefix = f"error: {f'rank {self._rank}: ' if self._rank else ''}" if code < 128 else ""
        print_line(f"{prefix}{text}") if prefix else self._print(text)
        os._exit(code)

    def _exit(self) -> None:
        """At exit, after giving up: the process group's destructor would wait for its threads, and they for others."""
        if self._exit_code is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self._exit_code)

    def _beat(self) -> None:
        """The thread of the store: a process that is the store may be stalled, and then it blocks."""
        store, count, keys = self._store, 0, [self._key(rank) for rank in range(self._size)]
        with suppress(RuntimeError):  # the process that was the store has ended
            while not self._no_beats.wait(BEAT):
                count += 1
                store.set(self._key(self._rank), f"{count} {self._position}")
                if self._wait is not None:
                    beats = store.multi_get(keys)
                    with self._lock:
                        self._unanswered = 0.0
                        self._heard = [
                            (new, 0.0 if new != old else seconds)
                            for new, (old, seconds) in zip(beats, self._heard, strict=True)
                        ]

    def _key(self, rank: int) -> str:
        """Where the heartbeat of a rank is; torchrun may keep the store when it restarts its processes."""
        return f"dualmcmc/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{rank}"


class _Wait:
    """What the main thread is waiting for."""

    def __init__(self, who: str = "") -> None:
        self.who = who  # while connecting; later it is known from the heartbeats
        self.seconds = 0.0
        self.notice = NOTICE  # seconds until the next message
        self.verdict: tuple[int, str] | None = None  # why to stop waiting: exit code and message


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message."""
    shown = [str(rank) for rank in ranks[:SHOWN_RANKS]]
    if len(ranks) > SHOWN_RANKS:
        return f"ranks {', '.join(shown)}, ... ({len(ranks)} in all)"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _accepts(host: str, port: int) -> bool:
    """Whether a process listens at this address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _seconds(variable: str, default: float) -> float:
    """A timeout from the environment."""
    text = os.environ.get(variable) or str(default)
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UserError(f"{variable}={sanitize(text)} is not a number of seconds greater than 0.")
