"""Download from package registries (npm, apt, pip), with the mirrors configured on this machine.

The client returns the URL and checksum of a package, which is then downloaded like any other file, with progress and
resume. If that URL needs more than a plain request, the client downloads it.
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

from dualmcmc.data.catalog import Package
from dualmcmc.data.download import InvalidDownload, Unreachable, download
from dualmcmc.utils.files import digest
from dualmcmc.utils.progress import ProgressFactory

TIMEOUT = 600  # seconds per client call
PACKAGE_SUFFIXES = (".tgz", ".deb", ".whl")
APT = ("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=")  # do not write the package cache
PIP = ("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check")


class PackageFile(NamedTuple):
    """A package's URL, file name and checksum."""

    url: str
    name: str
    algorithm: str
    checksum: bytes


def download_package(package: Package, folder: Path, progress: ProgressFactory) -> None:
    """Download a package's file into `folder` and verify the registry's checksum."""
    clients = {
        "npm": (_resolve_npm, _download_npm),
        "debian": (_resolve_apt, _download_apt),
        "pypi": (_resolve_pip, _download_pip),
    }
    resolve, download_with_client = clients[package.registry]
    file = resolve(package.name, folder)
    target = folder / file.name
    if not target.exists():
        try:
            download(file.url, target, progress)
        except Unreachable:
            download_with_client(package.name, folder)
            if not target.exists():
                raise Unreachable(f"{package.registry} saved {package.name} under another name") from None
    if digest(target, file.algorithm).digest() != file.checksum:
        raise InvalidDownload(f"the checksum of {file.name} is not the registry's")


def _run(folder: Path, client: str, *arguments: str) -> str:
    """The output of a client. It runs in a temporary folder inside `folder`; its packages are moved to `folder`."""
    program = (sys.executable, "-m", "pip") if client == "pip" else (client,)
    if shutil.which(program[0]) is None:
        raise Unreachable(f"{client} is not installed")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            variables = {"npm_config_cache": scratch, "npm_config_update_notifier": "false", "TMPDIR": scratch}
            result = subprocess.run(
                [*program, *arguments],
                cwd=scratch,
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                stdin=subprocess.DEVNULL,
            )
            if result.returncode == 0:  # otherwise a package may be incomplete
                for file in Path(scratch).iterdir():
                    if file.suffix in PACKAGE_SUFFIXES:
                        file.rename(folder / file.name)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{client} did not finish within {TIMEOUT} s") from None
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["failed without a message"]
        line = next((line for line in lines if "error" in line.lower() or line.startswith("E:")), lines[-1])
        raise Unreachable(f"{client}: {line.strip()[:200]}")
    return result.stdout


def _resolve_npm(name: str, folder: Path) -> PackageFile:
    try:
        info = json.loads(_run(folder, "npm", "view", name, "dist", "--json"))
        algorithm, _, code = info["integrity"].partition("-")
        if algorithm not in ("sha512", "sha384", "sha256"):
            raise ValueError(algorithm)
        file = name.replace("@", "-") + ".tgz"
        return PackageFile(info["tarball"], file, algorithm, base64.b64decode(code, validate=True))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreachable(f"npm returned no URL for {name}") from None


def _download_npm(name: str, folder: Path) -> None:
    _run(folder, "npm", "pack", name, "--silent")


def _resolve_apt(name: str, folder: Path) -> PackageFile:
    output = _run(folder, "apt-get", *APT, "download", "--print-uris", name)
    found = re.search(r"^'([^']+)' (\S+) \d+ (SHA512|SHA256):([0-9a-f]+)$", output, re.MULTILINE)
    if found is None or "/" in found[2]:
        raise Unreachable(f"apt-get returned no URL for {name} ('apt-get update' may help)")
    return PackageFile(found[1], found[2], found[3].lower(), bytes.fromhex(found[4]))


def _download_apt(name: str, folder: Path) -> None:
    _run(folder, "apt-get", *APT, "download", name)


def _resolve_pip(name: str, folder: Path) -> PackageFile:
    output = _run(folder, "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *PIP, name)
    try:
        (item,) = json.loads(output)["install"]
        url, checksum = item["download_info"]["url"], item["download_info"]["archive_info"]["hashes"]["sha256"]
        return PackageFile(url, urlsplit(url).path.rsplit("/", 1)[-1], "sha256", bytes.fromhex(checksum))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreachable(f"pip returned no URL for {name}") from None


def _download_pip(name: str, folder: Path) -> None:
    _run(folder, "pip", "download", "--quiet", *PIP, name)
