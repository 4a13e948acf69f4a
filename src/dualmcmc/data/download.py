"""HTTP downloads that retry, resume and verify."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dualmcmc.data.catalog import RemoteFile
from dualmcmc.utils.errors import CannotWrite
from dualmcmc.utils.files import digest
from dualmcmc.utils.progress import ProgressFactory, no_progress

PART_SUFFIX = ".part"
CHUNK = 1 << 18  # bytes
TIMEOUT = 20.0  # seconds without a response


class Unreachable(Exception):
    """A source is not available. What was downloaded so far is kept, to resume from."""


class InvalidDownload(Exception):
    """A source returned the wrong content, which must be deleted."""


def download_files(files: Sequence[RemoteFile], folder: Path, progress: ProgressFactory) -> None:
    """Download files into `folder`, each from the first of its URLs that works."""
    for file in files:
        target = folder / file.name
        for number, url in enumerate(file.urls, 1):
            try:
                if not target.exists():
                    download(url, target, progress)
                if file.sha256 is not None and digest(target, "sha256").hexdigest() != file.sha256:
                    target.unlink()
                    raise InvalidDownload(f"the checksum of {file.name} is not the published one")
                break
            except (Unreachable, InvalidDownload):
                if number == len(file.urls):
                    raise


def download(
    url: str,
    target: Path,
    progress: ProgressFactory = no_progress,
    attempts: int = 4,
    pause: float = 1.0,
    max_bytes: int | None = None,
) -> None:
    """Download `url` to the file `target`, resuming an earlier attempt if the server supports it."""
    if not url.startswith(("http://", "https://")):
        raise Unreachable(f"'{url}' is not an HTTP URL")
    part = target.with_name(target.name + PART_SUFFIX)
    for attempt in range(attempts):
        try:
            _attempt(url, part, progress, max_bytes)
            os.replace(part, target)
            return
        except urllib.error.HTTPError as error:
            problem = f"{_host(url)} returned {error.code} {error.reason}"
            if error.code == 416 and part.exists():
                if error.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
                    os.replace(part, target)  # the part is complete
                    return
                part.unlink()  # it belongs to another version of the file
            elif error.code < 500 and error.code not in (408, 429):
                raise Unreachable(problem) from None
        except urllib.error.URLError as error:
            raise Unreachable(f"{_host(url)}: {getattr(error.reason, 'strerror', None) or error.reason}") from None
        except (OSError, http.client.HTTPException, EOFError) as error:
            problem = f"{_host(url)}: {error or type(error).__name__}"
        if attempt + 1 < attempts:
            time.sleep(pause * 2**attempt)
    raise Unreachable(problem)


def _attempt(url: str, part: Path, progress: ProgressFactory, max_bytes: int | None) -> None:
    """One request; raises EOFError if the connection closes early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "dualmcmc", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        resumes = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status == 206 and not resumes:
            part.unlink(missing_ok=True)
            raise EOFError("the server sent a different range than requested")
        have = have if resumes else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        if max_bytes is not None and (total is None or total > max_bytes):
            part.unlink(missing_ok=True)
            stated = "an unknown number of" if total is None else f"{total:,}"
            raise InvalidDownload(f"{_host(url)} offers {stated} bytes instead of {max_bytes:,}")
        with progress(f"downloading {part.name.removesuffix(PART_SUFFIX)}", total, "bytes") as advance:
            advance(have)
            with _disk_errors(part), open(part, "ab") as file:
                file.truncate(have)
            while chunk := response.read(CHUNK):
                with _disk_errors(part), open(part, "ab") as file:  # reopened, to tell disk from network errors
                    file.write(chunk)
                have += len(chunk)
                advance(len(chunk))
        if total is not None and have < total:
            raise EOFError(f"the connection closed after {have:,} of {total:,} bytes")


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise `CannotWrite` for errors inside, so that they are not taken for network errors."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None


def _host(url: str) -> str:
    return url.split("/")[2]
