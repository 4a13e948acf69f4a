"""Writing files so that a kill at any moment leaves the old one or the new one, never half of one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualmcmc.errors import CannotWrite, UserError

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
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None
    finally:
        with suppress(OSError):  # it is gone, renamed, or was never there
            temporary.unlink()


def sweep(path: Path, certain: bool = False) -> None:
    """Remove what killed processes left of files like `path`; `certain`: nobody else can be writing there now."""
    for leftover in path.parent.glob(f".*{path.suffix}.*{TEMPORARY}"):
        with suppress(OSError, ValueError):
            process = int(leftover.name.split(".")[-2])
            idle = time.time() - leftover.stat().st_mtime > 60  # another machine's process cannot be asked
            if certain or (idle and not Path(f"/proc/{process}").exists()):
                leftover.unlink()


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
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(path: Path, algorithm: str) -> hashlib._Hash:
    """A file's checksum, in bounded memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm)


def make_folder(path: Path, advice: str = "Choose another --out.") -> Path:
    """A folder that exists and can be written to."""
    if path.is_file():
        raise UserError(f"'{path}' is a file: name a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{path}': {error.strerror or error}. {advice}") from None
    _check_writable(path, advice)
    return path


def check_target(path: Path, *endings: str, option: str = "--out") -> Path:
    """A file that can be written here: a known ending, in a folder that exists and can be written to."""
    if path.suffix.lower() not in endings:
        raise UserError(f"{option} '{path}' must end in {' or '.join(endings)}.")
    if path.is_dir():
        raise UserError(f"{option} '{path}' is a folder.")
    if not path.parent.is_dir():
        raise UserError(f"the folder of {option} '{path}' does not exist.")
    _check_writable(path.parent, f"Choose another {option}.")
    return path


def _check_writable(folder: Path, advice: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into '{folder}': it is read-only for you. {advice}")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
