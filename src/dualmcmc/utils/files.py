"""Atomic writes, reading of regular files only, checks of output paths, and the cache folder."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dualmcmc.utils.errors import CannotWrite, UserError

TEMPORARY = ".tmp"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to `path` when the block succeeds: a kill leaves the old file or the new one.

    The name is random and the file is created here, so nobody can have placed a link there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}")
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)  # as the umask wants it; a library may replace the file
        os.close(handle)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None
    finally:
        with suppress(OSError):  # renamed, or never created
            temporary.unlink()


def is_temporary(path: Path) -> bool:
    """Whether a file has a name that `atomic` gives (or gave, in earlier versions)."""
    return re.search(rf"\.\d+(-[0-9a-f]{{16}})?{re.escape(TEMPORARY)}$", path.name) is not None


def remove_stale_temporaries(path: Path, exclusive: bool = False) -> None:
    """Remove temporary files of killed processes beside `path`; `exclusive`: no other process can be writing there."""
    for leftover in path.parent.glob(f".*{path.suffix}.*{TEMPORARY}"):
        with suppress(OSError, ValueError):
            process = int(leftover.name.split(".")[-2].partition("-")[0])
            idle = time.time() - leftover.stat().st_mtime > 60  # a process on another machine cannot be checked
            if exclusive or (idle and not Path(f"/proc/{process}").exists()):
                leftover.unlink()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; a pipe would block, a device may never end."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: that alone can have effects on a device
            raise UserError(f"'{path}' cannot be read: it is not a regular file.")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise UserError(f"file '{path}' does not exist.") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {(error.strerror or str(error)).lower()}.") from None


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a regular file of limited size; malformed characters are replaced."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise UserError(f"'{path}' cannot be read: it is larger than {max_bytes:,} bytes.")
        return file.read(max_bytes).decode("utf-8", errors="replace")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def to_json(value: Any) -> str:
    """One line of JSON; NaN and infinity, which JSON lacks, become strings."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def digest(path: Path, algorithm: str) -> hashlib._Hash:
    """A file's hash, in bounded memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm)


def expand_user(path: str | Path) -> Path:
    """`path` with ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"'{path}': there is no such home folder. Write ./~ if the name begins with ~.") from None


def make_folder(path: Path, advice: str = "Choose another --out.") -> Path:
    """Create a folder if necessary and check that it is writable."""
    if path.is_file():
        raise UserError(f"'{path}' is a file: expected a folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder '{path}': {error.strerror or error}. {advice}") from None
    _check_writable(path, advice)
    return path


def check_output(path: Path, *suffixes: str, option: str = "--out") -> Path:
    """Check an output path: its suffix, and that its folder exists and is writable."""
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{option} '{path}' must end in {' or '.join(suffixes)}.")
    if path.is_dir():
        raise UserError(f"{option} '{path}' is a folder.")
    if not path.parent.is_dir():
        raise UserError(f"{option} '{path}': its folder does not exist.")
    _check_writable(path.parent, f"Choose another {option}.")
    return path


def _check_writable(folder: Path, advice: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into '{folder}': permission denied. {advice}")


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


CACHE_VARIABLE = "DUALMCMC_DATA"


def cache_folder() -> Path:
    """$DUALMCMC_DATA, or dualmcmc in $XDG_CACHE_HOME (default ~/.cache)."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return expand_user(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dualmcmc"
