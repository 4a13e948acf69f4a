"""Weights that have a name instead of a path: pretrained ones, such as cifar10-simple, and those on the Hub.

The file of pretrained weights is that of the checkout, or one in the cache folder, or downloaded into it. It is used
only if it has the SHA-256 that is pinned here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from dualmcmc import hub
from dualmcmc.utils.errors import Damaged, UserError
from dualmcmc.utils.files import cache_folder, digest, make_folder
from dualmcmc.utils.progress import ProgressFactory, print_line, show_progress

TAG = "v1"  # of the repositories; later files there have another
OUTPUT = Path("pretrained")  # commands write their output for weights with a name to OUTPUT/NAME
CHECKOUT = Path(__file__).resolve().parents[2]  # if the package is not installed elsewhere


class Pretrained(NamedTuple):
    """Published weights: their repository on the Hub, and the file as it was published."""

    repo: str
    sha256: str
    size: int  # bytes

    @property
    def url(self) -> str:
        """Where the file is downloaded."""
        endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        return f"{endpoint}/{self.repo}/resolve/{TAG}/{hub.FILE}"


PRETRAINED = {
    "cifar10-simple": Pretrained(
        "dualmcmc/cifar10-simple", "33742b9e42c4e6a8aea786661149def9e6a47c8f6d382f5b50f8fe059eb2aeb8", 32_127_512
    ),
}


def is_pretrained(target: str | Path) -> bool:
    """Whether `target` is the name of pretrained weights; a file or folder of that name takes precedence."""
    return str(target) in PRETRAINED and not Path(target).exists()


def has_name(target: str | Path) -> bool:
    """Whether `target` is the name of weights, pretrained or on the Hub, and not a path."""
    return is_pretrained(target) or hub.parse_name(target) is not None


def output_folder(run: Path) -> Path:
    """Where pictures and results of a run go: its folder, that of a snapshot, or pretrained/NAME."""
    if is_pretrained(run):
        return OUTPUT / run
    if name := hub.parse_name(run):
        return OUTPUT / name.folder
    return run.parent if run.suffix == ".safetensors" else run


def checkout_file(name: str) -> Path | None:
    """The file in the checkout from which this package runs; None if it runs from elsewhere, or has no such file."""
    path = CHECKOUT / "weights" / f"{name}.safetensors"
    return path if (CHECKOUT / "pyproject.toml").is_file() and path.exists() else None


def cached_file(name: str) -> Path:
    """Where downloaded weights are, whether they have been or not."""
    return cache_folder() / "pretrained" / f"{name}.safetensors"


def pretrained_file(name: str, progress: ProgressFactory = show_progress) -> Path:
    """The verified file of pretrained weights, downloaded if necessary."""
    path = checkout_file(name)
    if path is not None:
        if not _is_published(path, name):
            raise Damaged(f"'{path}' is not the published file: restore it, or delete it to download it.")
        return path
    path = cached_file(name)
    return path if _is_published(path, name) else _fetch(name, path, progress)


def _is_published(path: Path, name: str) -> bool:
    entry = PRETRAINED[name]
    try:
        return path.stat().st_size == entry.size and digest(path, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def _fetch(name: str, target: Path, progress: ProgressFactory) -> Path:
    from filelock import FileLock

    from dualmcmc.data.download import InvalidDownload, Unreachable, download

    entry = PRETRAINED[name]
    make_folder(target.parent, "Choose another $DUALMCMC_DATA.")
    with FileLock(target.parent / f".{name}.lock"):
        if _is_published(target, name):  # by another process, meanwhile
            return target
        if target.exists():
            print_line(f"'{target}' is damaged: fetching it again")
        staged = target.with_suffix(".download")
        try:
            if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
                raise Unreachable("HF_HUB_OFFLINE is set")
            download(entry.url, staged, progress, max_bytes=entry.size)
            if not _is_published(staged, name):
                staged.unlink()
                raise InvalidDownload("the file is not the published one; deleted")
        except (Unreachable, InvalidDownload) as error:
            manually = f"save {entry.url} as '{target}'"
            raise UserError(f"cannot fetch {name} ({error}): try again later, or {manually}.") from None
        os.replace(staged, target)
    return target
