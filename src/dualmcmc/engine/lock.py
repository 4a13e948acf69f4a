"""One process at a time writes into a run folder. The system takes the lock back from a process that dies."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from dualmcmc.errors import CannotWrite, UserError

_ours: set[Path] = set()  # locked by this process, which the system would let lock them again


class RunLock:
    """Held while a run is being trained; `path` stays behind and means nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if self.path in _ours:
            raise self._taken("this process")
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CannotWrite(f"cannot write '{self.path}': {error.strerror or error}.") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._taken(holder or "another process") from None
            return self  # a file system without locks: better a run than none
        with suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _ours.add(self.path)
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            _ours.discard(self.path)
            os.close(self._file)
            self._file = None

    def _taken(self, holder: str) -> UserError:
        return UserError(
            f"'{self.path.parent}' is being trained by {holder}: wait for it, stop it, or choose another --out."
        )
