"""What a run writes down as it goes: JSON lines and TensorBoard curves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from dualmcmc.engine.folder import RunFolder
from dualmcmc.files import to_json, write_text


class Journal:
    """Appends to log.jsonl and to TensorBoard.

    On resume from `images`, lines past that point belong to work that is done again: they are dropped.
    """

    def __init__(self, folder: RunFolder, images: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if folder.log.exists():
            kept = [line for line in read(folder.log) if line["images"] <= images]
            write_text(folder.log, "".join(to_json(entry) + "\n" for entry in kept))
        self._file = open(folder.log, "a", encoding="utf-8")  # noqa: SIM115 - open for the run's length
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=images + 1)

    def event(self, kind: str, images: int, **facts: Any) -> None:
        """Note that something happened (start, resume, save, stop, diverged)."""
        self._write({"kind": kind, "images": images, "time": round(time.time(), 3), **facts})

    def record(self, numbers: dict[str, float]) -> None:
        """Note the numbers of a stretch of training; `images` among them is the x-axis."""
        self._write({"kind": "train", **numbers})
        for name, value in numbers.items():
            if name not in ("images", "iteration"):
                self._board.add_scalar(name, value, int(numbers["images"]))

    def picture(self, name: str, pixels: Any, images: int) -> None:
        """A (C, h, w) byte picture for TensorBoard."""
        self._board.add_image(name, pixels, images)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        self._board.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(to_json(entry) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; what is no line of it, as a last one cut short by a kill, is left out."""
    entries = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (json.JSONDecodeError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("images"), int):
                entries.append(entry)
    return entries
