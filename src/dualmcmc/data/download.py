"""Downloads that go on where they stopped."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualmcmc.errors import CannotWrite
from dualmcmc.progress import Watch, quiet

PART = ".part"
CHUNK = 1 << 18
PATIENCE = 20.0  # seconds without an answer


class Unreachable(Exception):
    """A source that cannot be had now, and why. What has been downloaded of it is kept, to go on with."""


class Wrong(Exception):
    """A source that gave something else than was asked for. It is removed."""


def download(url: str, to: Path, watch: Watch = quiet, attempts: int = 4, pause: float = 1.0) -> None:
    """`url` as the file `to`; a part from an earlier try is gone on with, where the server allows it."""
    if not url.startswith(("http://", "https://")):
        raise Unreachable(f"'{url}' is not a web address")
    part = to.with_name(to.name + PART)
    for attempt in range(attempts):
        try:
            _attempt(url, part, watch)
            os.replace(part, to)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and part.exists():
                if error.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
                    os.replace(part, to)  # we hold all of it
                    return
                part.unlink()  # what we hold does not belong to what is there
            elif error.code < 500 and error.code not in (408, 429):
                raise Unreachable(f"{_host(url)} answers {error.code} {error.reason}") from None
            problem = f"{_host(url)} answers {error.code} {error.reason}"
        except urllib.error.URLError as error:
            raise Unreachable(f"{_host(url)}: {getattr(error.reason, 'strerror', None) or error.reason}") from None
        except (OSError, http.client.HTTPException, EOFError) as error:
            problem = f"{_host(url)}: {error or type(error).__name__}"
        if attempt + 1 < attempts:
            time.sleep(pause * 2**attempt)
    raise Unreachable(problem)


def _attempt(url: str, part: Path, watch: Watch) -> None:
    """One request; raises EOFError where the connection ends early."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "dualmcmc", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if answer.status == 206 and not goes_on:
            part.unlink(missing_ok=True)
            raise EOFError("the server sent another part than was asked for")
        have = have if goes_on else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with watch(f"downloading {part.name.removesuffix(PART)}", total, "bytes") as advance:
            advance(have)
            with _disk(part), open(part, "ab") as file:
                file.truncate(have)
            while chunk := answer.read(CHUNK):
                with _disk(part), open(part, "ab") as file:  # opened anew: only its errors are the disk's
                    file.write(chunk)
                have += len(chunk)
                advance(len(chunk))
        if total is not None and have < total:
            raise EOFError(f"the connection ended after {have:,} of {total:,} bytes")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """What goes wrong here is the disk's fault, not the network's."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write '{path}': {error.strerror or error}.") from None


def _host(url: str) -> str:
    return url.split("/")[2]
