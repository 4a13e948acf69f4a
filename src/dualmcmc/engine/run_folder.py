"""The files of a run folder, how a run is named, and the lock that protects it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dualmcmc import config_io, hub
from dualmcmc.config import Config
from dualmcmc.pretrained import PRETRAINED, has_name, is_pretrained, pretrained_file
from dualmcmc.utils.errors import CannotWrite, UserError
from dualmcmc.utils.files import TEMPORARY, expand_user, is_temporary, write_text


class RunFolder:
    """Paths inside a run folder. Creates nothing by itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.log = root / "log.jsonl"
        self.tensorboard = root / "tensorboard"
        self.wandb = root / "wandb"
        self.trackers = root / "trackers.json"
        self.samples = root / "samples"
        self.states = root / "states"
        self.snapshot = root / "snapshot.safetensors"
        self.snapshots = root / "snapshots"
        self.results = root / "results"
        self.report = root / "report.html"
        self.lock = root / ".lock"

    def require_no_links(self) -> None:
        """Raise `UserError` if the folder contains a link, which writing would follow, or a special file."""
        folders = (
            self.root, self.states, self.samples, self.snapshots, self.tensorboard, self.wandb, self.results
        )  # fmt: skip
        for folder in folders:
            if folder != self.root and folder.is_symlink():
                continue  # reported as an entry of the root
            for path in folder.iterdir() if folder.is_dir() else ():
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    kind = "a link" if path.is_symlink() else "not a regular file"
                    raise UserError(f"'{path}' is {kind}, and a run folder must not contain one: remove it.")

    def traces_of_a_run(self) -> list[Path]:
        """Files that only a run writes, and that a new run would replace."""
        return [path for path in (self.snapshot, self.log, self.config, self.results) if os.path.lexists(path)]

    def has_states(self) -> bool:
        """Whether there is a state to resume from; the first is saved before the first iteration."""
        return bool(self.saved_states())

    def require_run(self) -> None:
        """Raise `UserError` if this is not a run folder."""
        if has_name(self.root):
            raise UserError(f"{hub.parse_name(self.root) or self.root} is the name of weights, not a run folder.")
        if not self.root.exists():
            raise UserError(f"run folder '{self.root}' does not exist.")
        if not self.config.exists():
            raise UserError(f"'{self.root}' is not a run folder: it has no config.yaml.")

    def write_config(self, config: Config) -> None:
        """Write config.yaml, with comments."""
        write_text(self.config, config_io.render(config))

    def state_path(self, images: int) -> Path:
        """The full state after `images` images."""
        return self.states / f"{images:012d}.safetensors"

    def snapshot_path(self, images: int) -> Path:
        """The kept snapshot after `images` images (`train.snapshot_every`)."""
        return self.snapshots / f"{images:012d}.safetensors"

    def kept_snapshots(self) -> list[Path]:
        """All kept snapshots, oldest first."""
        return _numbered(self.snapshots)

    def saved_states(self) -> list[Path]:
        """All full states, oldest first."""
        return _numbered(self.states)

    def latest_state(self) -> Path:
        """The newest full state."""
        states = self.saved_states()
        if not states:
            raise UserError(f"'{self.root}' has no saved state to resume from.")
        return states[-1]

    def remove_temporary_files(self) -> None:
        """Delete what a process of this run left behind when it was killed while writing.

        Without settings there is no run yet, but one may have been killed while it wrote them; whatever else is
        temporary here belongs to another program.
        """
        pattern = f".*{TEMPORARY}" if self.config.exists() else f".{self.config.name}.*{TEMPORARY}"
        for part in (self.root, self.states, self.snapshots, self.samples):
            for path in part.glob(pattern):
                if is_temporary(path):
                    path.unlink(missing_ok=True)

    def quarantine(self, state: Path) -> None:
        """Rename a damaged state, so that it is no longer used but can be inspected."""
        state.replace(state.with_suffix(".damaged"))

    def prune_states(self, keep: int) -> None:
        """Delete all but the newest `keep` states."""
        for path in self.saved_states()[:-keep]:
            path.unlink(missing_ok=True)


class WeightsFile(NamedTuple):
    """A file of weights, and where it came from: its path, or hf://USER/NAME@COMMIT."""

    path: Path
    source: str


def locate_run(target: str | Path) -> RunFolder | WeightsFile:
    """What `target` names: a run folder, or a file: a snapshot, or weights with a name, downloaded if necessary."""
    if not str(target).strip():  # Path("") would be the current folder
        raise UserError("the name of the run is empty.")
    if name := hub.parse_name(target):
        file, pinned = hub.download(name)
        return WeightsFile(file, str(pinned))
    path = expand_user(target)
    if is_pretrained(path):
        path = pretrained_file(str(path))
    is_file_name = path.suffix == ".safetensors"
    if not path.exists() and not is_file_name:
        raise UserError(f"run '{path}' does not exist. Pretrained weights: {', '.join(PRETRAINED)}.")
    if not path.is_dir() and (path.exists() or is_file_name):
        return WeightsFile(path, str(path))
    folder = RunFolder(path)
    folder.require_run()
    return folder


def locate_snapshot(target: str | Path) -> WeightsFile:
    """The snapshot that `target` names: see `locate_run`."""
    found = locate_run(target)
    if isinstance(found, WeightsFile):
        return found
    if not found.snapshot.exists():
        raise UserError(f"'{found.root}' has no snapshot: 'dualmcmc train --resume --out {found.root}' writes one.")
    return WeightsFile(found.snapshot, str(found.snapshot))


def _numbered(folder: Path) -> list[Path]:
    """The files of a folder that are named by a number of images, in order."""
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdecimal())


_held: set[Path] = set()  # by this process: a process could lock its own files again


class RunLock:
    """An exclusive lock on a run folder, released by the operating system if the process dies.

    The file names its holder, for the error message; the `filelock` package would truncate it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if self.path in _held:
            raise self._locked_by("this process")
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CannotWrite(f"cannot write '{self.path}': {error.strerror or error}.") from None
        if os.fstat(file).st_nlink > 1:  # its content would be overwritten elsewhere too
            os.close(file)
            raise CannotWrite(f"cannot write '{self.path}': it is a hard link. Remove it.")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise self._locked_by(holder or "another process") from None
            return self  # the file system has no locks: run without
        with suppress(OSError):  # the disk may be full; the lock holds anyway
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self.path)
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            _held.discard(self.path)
            os.close(self._file)
            self._file = None

    def _locked_by(self, holder: str) -> UserError:
        return UserError(
            f"'{self.path.parent}' is being trained by {holder}: wait for it, stop it, or choose another --out."
        )
