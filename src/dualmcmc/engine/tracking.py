"""Runs the trackers of a run in threads of their own, so that a slow or failing one neither delays nor stops training.

What may go wrong with a tracker is reported once, in one line; then it is not used any more.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dualmcmc.config import Config
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.engine.trackers import CLOSE_TIMEOUT, OPEN_TIMEOUT, MLflow, TensorBoard, Tracker, WandB
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.extras import is_installed
from dualmcmc.utils.files import read_text, to_json, write_text

TITLES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
IDS = {"wandb": r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", "mlflow": r"[0-9a-f]{32}"}  # of their runs
MAX_IDS = 4096  # bytes of the file that contains them
MAX_QUEUE = 1000  # calls that a tracker may be behind
MAX_REASON = 300  # characters of a failure
NOTICE = 2.0  # seconds of waiting until it is reported
POLL = 0.1  # seconds between two looks for a signal
LATE = 5.0  # seconds for a tracker's own timeout to end a call, before it is abandoned


class TrackerThread:
    """A tracker and the thread that uses it.

    `failure`: why it is not used any more. `refusal`: bad input that it found when it was opened.
    """

    def __init__(self, title: str, make: Callable[[], Tracker]) -> None:
        self.title = title
        self.failure: str | None = None
        self.refusal: UserError | None = None
        self.tracker = Tracker()  # until it is opened
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_QUEUE)
        self._opened, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._work, args=(make,), name=f"dualmcmc-{title}", daemon=True).start()

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            self.tracker = make()
            self._opened.set()
            while self.failure is None and (call := self._calls.get()) is not None:
                call(self.tracker)
        except UserError as error:  # raised when it is opened only
            self.refusal = error
        except BaseException as error:  # a library may also raise SystemExit
            self.failure = self.failure or sanitize(" ".join(str(error).split()) or type(error).__name__, MAX_REASON)
        if self.failure is not None:
            with suppress(BaseException):
                self.tracker.close(True)
        self._opened.set()
        self._ended.set()

    def send(self, call: Callable[[Tracker], None] | None) -> None:
        """Have the thread make a call; returns at once. None: there are no more."""
        if self.failure is None:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self.failure = f"it is {MAX_QUEUE:,} calls behind"

    def wait_until_opened(self, start: float, notify: Callable[[str], None], stopped: Callable[[], bool]) -> None:
        """Wait until it is opened, in vain, or a signal has arrived; `start`: when the waiting for all began."""
        self._wait(self._opened, start, OPEN_TIMEOUT, notify, stopped)
        if self.refusal is not None:
            raise self.refusal

    def wait_until_ended(self, start: float, notify: Callable[[str], None]) -> None:
        """Wait until its last call has returned."""
        if self.failure is None:
            self._wait(self._ended, start, CLOSE_TIMEOUT, notify, lambda: False)

    def _wait(
        self,
        event: threading.Event,
        start: float,
        timeout: float,
        notify: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        noticed = False
        while not event.wait(POLL):  # in short intervals, so that signals are handled
            waited = time.monotonic() - start
            if stopped():
                self.failure = "it was not opened when a signal arrived"
                return
            if waited > timeout + LATE:
                self.failure = f"no answer within {timeout:.0f} s"
                return
            if waited > NOTICE and not noticed:
                noticed = True
                notify(f"waiting for {self.title}, at most {timeout:.0f} s")


class Trackers:
    """The trackers of a run. `notify` shows a line of text."""

    def __init__(self, threads: list[TrackerThread], notify: Callable[[str], None] = lambda text: None) -> None:
        self._threads, self._notify = threads, notify

    def send(self, call: Callable[[Tracker], None]) -> None:
        """Have each tracker make a call; returns at once."""
        for thread in self._threads:
            thread.send(call)

    def drop_failed(self) -> list[str]:
        """Stop using those that have failed; says so, and returns what it says."""
        failed = [thread for thread in self._threads if thread.failure is not None]
        self._threads = [thread for thread in self._threads if thread.failure is None]
        texts = [f"{thread.title} failed ({thread.failure}): the run continues without it" for thread in failed]
        for text in texts:
            self._notify(text)
        return texts

    def close(self, failed: bool) -> None:
        """Send the rest, for a limited time. `failed`: the session was ended by an error."""
        self.send(lambda tracker: tracker.close(failed))
        for thread in self._threads:
            thread.send(None)
        start = time.monotonic()
        for thread in self._threads:
            thread.wait_until_ended(start, self._notify)
            if thread.failure is not None:
                self._notify(f"{thread.title} did not receive everything ({thread.failure})")
        self._threads = []


def check_trackers(names: tuple[str, ...], folder: RunFolder) -> None:
    """Raise `UserError` if a tracker is not installed, or the run folder could choose where it sends data.

    TensorBoard, the default, may be missing.
    """
    here = Path.cwd()
    for name in names:
        if name == "tensorboard":
            continue
        if not is_installed(name):
            raise UserError(f"train.trackers={name} needs the package {name}: pip install 'dualmcmc[trackers]'.")
        if folder.root.resolve() in (here, *here.parents):  # both read the current folder, for the address of a server
            raise UserError(
                f"{TITLES[name]} would read settings from the current folder, which is in the run folder, and they may "
                "be somebody else's: change to another folder."
            )


def open_trackers(
    config: Config,
    folder: RunFolder,
    images: int,
    resume: bool,
    notify: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Trackers:
    """Open the trackers that the config names; a resumed run continues its runs there."""
    stored = _read_ids(folder) if resume else {}
    make: dict[str, Callable[[], Tracker]] = {
        "tensorboard": partial(TensorBoard, folder.tensorboard, images),
        "wandb": partial(WandB, config, folder.root, stored.get("wandb")),
        "mlflow": partial(MLflow, config, folder.root, stored.get("mlflow")),
    }
    names = [name for name in dict.fromkeys(config.train.trackers) if name != "tensorboard" or is_installed(name)]
    threads = {name: TrackerThread(TITLES[name], make[name]) for name in names}
    trackers = Trackers(list(threads.values()), notify)
    try:
        start = time.monotonic()
        for thread in threads.values():
            thread.wait_until_opened(start, notify, stopped)
        ids = dict(stored)
        for name, thread in threads.items():
            tracker = thread.tracker
            if tracker.location:
                notify(f"{thread.title}: {sanitize(tracker.location, 500)}")
            if tracker.id is not None:
                ids[name] = tracker.id
        if ids != stored:
            write_text(folder.trackers, to_json(ids) + "\n")
    except BaseException:
        trackers.close(failed=True)
        raise
    return trackers


def _read_ids(folder: RunFolder) -> dict[str, str]:
    """The trackers' ids of this run. Whatever else the file contains is ignored."""
    ids: Any = None
    if folder.trackers.exists():
        with suppress(ValueError, RecursionError):
            ids = json.loads(read_text(folder.trackers, MAX_IDS))
    found = ids if isinstance(ids, dict) else {}
    return {
        name: found[name]
        for name, pattern in IDS.items()
        if isinstance(found.get(name), str) and re.fullmatch(pattern, found[name])
    }
