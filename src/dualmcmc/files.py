"""Writing files so that a kill at any moment leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualmcmc.errors import UserError

TEMPORARY = ".tmp"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; what is written there becomes `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}.") from None
    finally:
        with suppress(OSError):  # it is gone, renamed, or was never there
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of the file, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_json(value: Any) -> str:
    """One line of JSON, which has no NaN or infinity: such a number is written as text."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(path: Path) -> Path:
    """A folder that exists and can be written to."""
    if path.is_file():
        raise UserError(f"'{path}' is a file: name a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{path}': {error.strerror or error}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into '{path}': permission denied. Choose another --out.")
    return path


def check_target(path: Path, *endings: str) -> Path:
    """A file that can be written here: a known ending, in a folder that exists."""
    if path.suffix.lower() not in endings:
        raise UserError(f"--out '{path}' must end in {' or '.join(endings)}.")
    if path.is_dir():
        raise UserError(f"--out '{path}' is a folder.")
    if not path.parent.is_dir():
        raise UserError(f"the folder of --out '{path}' does not exist.")
    return path


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
