"""What a run writes down as it goes: JSON lines and TensorBoard curves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualmcmc.engine.folder import RunFolder
from dualmcmc.errors import CannotWrite
from dualmcmc.files import to_json, write_text


class Journal:
    """Appends to log.jsonl and to TensorBoard.

    On resume from `images`, lines past that point belong to work that is done again: they are dropped.
    """

    def __init__(self, folder: RunFolder, images: int) -> None:
        self._folder = folder
        self._open(images)

    def _open(self, images: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder
        if folder.log.exists():
            kept = [line for line in read(folder.log) if line["images"] <= images]
            write_text(folder.log, "".join(to_json(entry) + "\n" for entry in kept))
        with _writing(folder.root):
            self._file = open(folder.log, "a", encoding="utf-8")  # noqa: SIM115 - open for the run's length
            self._board = SummaryWriter(str(folder.tensorboard), purge_step=images + 1)
        threading.excepthook = _in_a_thread

    def rewind(self, images: int) -> None:
        """The run went back to this point: what was written of the way past it is dropped."""
        self.close()
        self._open(images)

    def event(self, kind: str, images: int, **facts: Any) -> None:
        """Note that something happened (start, resume, note, save, stop, diverged, rollback)."""
        self._write({"kind": kind, "images": images, "time": round(time.time(), 3), **facts})

    def record(self, numbers: dict[str, float]) -> None:
        """Note the numbers of a stretch of training; `images` among them is the x-axis."""
        self._write({"kind": "train", **numbers})
        with _writing(self._folder.tensorboard):
            for name, value in numbers.items():
                if name not in ("images", "iteration"):
                    self._board.add_scalar(name, value, int(numbers["images"]))

    def picture(self, name: str, pixels: Any, images: int) -> None:
        """A (C, h, w) byte picture for TensorBoard."""
        with _writing(self._folder.tensorboard):
            self._board.add_image(name, pixels, images)

    def close(self) -> None:
        """Flush and close; what cannot be written by now is no reason to fail."""
        for closed in (self._file, self._board):
            with suppress(OSError):
                closed.close()
        threading.excepthook = threading.__excepthook__

    def _write(self, entry: dict[str, Any]) -> None:
        with _writing(self._folder.log):
            self._file.write(to_json(entry) + "\n")
            self._file.flush()


class Silent(Journal):
    """Of a process that does not write: another one does."""

    def __init__(self) -> None:
        pass

    def event(self, kind: str, images: int, **facts: Any) -> None:
        """Nothing."""

    def record(self, numbers: dict[str, float]) -> None:
        """Nothing."""

    def picture(self, name: str, pixels: Any, images: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None


def _in_a_thread(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard writes in a thread; a full disk there is raised again at its next call, and need not be shown."""
    if not issubclass(failed.exc_type, OSError):
        threading.__excepthook__(failed)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; what is no line of it, as a last one cut short by a kill, is left out."""
    entries = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("images"), int):
                entries.append(entry)
    return entries
