"""Weights on the Hugging Face Hub: `hf://USER/NAME[@REVISION]`, downloaded into the library's own cache, and uploaded.

One file of a repository is downloaded, `FILE`. It is read as safetensors like any checkpoint; nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dualmcmc.utils.errors import UserError, first_line, sanitize
from dualmcmc.utils.extras import require
from dualmcmc.utils.files import read_text

FILE, CARD = "model.safetensors", "README.md"
MAX_BYTES = 8 << 30  # two billion parameters in float32
MAX_CARD = 1 << 20  # bytes
PREFIX = "hf:/"  # pathlib joins the two slashes of hf://
WORD = r"[A-Za-z0-9](?:[\w.-]*\w)?"
REPO = re.compile(rf"{WORD}/{WORD}", re.ASCII)
REVISION = re.compile(r"\w(?:[\w./+-]*[\w+-])?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """A repository on the Hub and, if given, a branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    @property
    def folder(self) -> Path:
        """A relative path for files about these weights."""
        return Path(self.repo + (f"@{self.revision.replace('/', '-')}" if self.revision else ""))


def parse_name(target: str | Path) -> HubName | None:
    """The repository that `target` names; None if it is not of the form hf://…"""
    text = str(target)
    if not f"{text}/".startswith(PREFIX):
        return None
    repo, at, revision = text.removeprefix(PREFIX).removeprefix("/").partition("@")
    if not _is_repo(repo) or bool(at) != bool(REVISION.fullmatch(revision)) or ".." in revision:
        raise UserError(f"'{sanitize(text)}': use hf://USER/NAME or hf://USER/NAME@REVISION.")
    return HubName(repo, revision or None)


def parse_repo(text: str) -> str:
    """USER/NAME, or hf://USER/NAME."""
    repo = text.removeprefix("hf://")
    if not _is_repo(repo):
        raise UserError(f"'{sanitize(text)}' is not the name of a repository: use USER/NAME.")
    return repo


def _is_repo(text: str) -> bool:
    return bool(REPO.fullmatch(text)) and len(text) <= 96 and ".." not in text and "--" not in text


def download(name: HubName) -> tuple[Path, HubName]:
    """The file of these weights in the library's cache, downloaded if necessary, and their name with the commit."""
    hub = require("huggingface_hub", "hub", f"loading {name}")
    if name.revision and COMMIT.fullmatch(name.revision):  # its contents cannot have changed
        path = hub.try_to_load_from_cache(name.repo, FILE, revision=name.revision)
        if isinstance(path, str):
            return Path(path), name
    with _one_line_errors(name):
        try:
            size = hub.get_hf_file_metadata(hub.hf_hub_url(name.repo, FILE, revision=name.revision)).size
        except Exception as error:
            path = _cached(name) if _is_temporary(error) else None
            if path is None:
                raise
        else:
            if size is None or size > MAX_BYTES:
                stated = "an unknown number of" if size is None else f"{size:,}"
                raise UserError(f"{name} has {stated} bytes, more than the limit of {MAX_BYTES:,}.")
            path = hub.hf_hub_download(name.repo, FILE, revision=name.revision)
    return Path(path), HubName(name.repo, Path(path).parent.name)  # the cache has one folder per commit


def _cached(name: HubName) -> str | None:
    """What the name referred to when it was last downloaded."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return hf_hub_download(name.repo, FILE, revision=name.revision, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def _is_temporary(error: Exception) -> bool:
    """Whether the Hub could not be reached, or was told not to be, or failed: not an answer about the repository."""
    from huggingface_hub.errors import HfHubHTTPError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    return status is None or status >= 500 or status == 429


class Upload(NamedTuple):
    """A commit on the Hub, and whether it wrote the model card."""

    commit: str
    url: str
    card: bool


def upload(
    repo: str,
    file: Path,
    card: str,
    message: str,
    update: Callable[[str], str | None],
    private: bool = False,
    branch: str | None = None,
) -> Upload:
    """Commit weights and model card, creating repository and branch if necessary.

    `update(existing)` is the card that replaces an existing one, or None to keep it.
    """
    if branch is not None and (not REVISION.fullmatch(branch) or ".." in branch):
        raise UserError(f"'{sanitize(branch)}' is not the name of a branch.")
    hub = require("huggingface_hub", "hub", "push")
    with _one_line_errors(HubName(repo, branch), writing=True):
        api = hub.HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"hf://{repo} exists and is public: make it private in its settings on the Hub first.")
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        operations = [hub.CommitOperationAdd(FILE, str(file))]
        written: str | None = card
        if api.file_exists(repo, CARD, revision=branch):
            path = Path(hub.hf_hub_download(repo, CARD, revision=branch))
            written = update(read_text(path, MAX_CARD))
        if written is not None:
            operations.append(hub.CommitOperationAdd(CARD, written.encode()))
        made = api.create_commit(repo, operations, commit_message=message, revision=branch)
    return Upload(made.oid, made.commit_url, written is not None)


@contextmanager
def _one_line_errors(name: HubName, writing: bool = False) -> Iterator[None]:
    """Turn the library's errors into a `UserError`.

    They have no common base class: besides its own, it lets those of its HTTP and upload libraries through.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{_explanation(error, name, writing)}.") from None


def _explanation(error: Any, name: HubName, writing: bool) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name.repo}"
    log_in = "log in with 'hf auth login', or set HF_TOKEN"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    cannot = f"cannot {'write' if writing else 'load'} {name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        where = "" if writing else " and it is not in the cache"
        return f"{cannot}: HF_HUB_OFFLINE is set{where}"
    if isinstance(error, errors.GatedRepoError):
        return f"{cannot}: accept its conditions at {page}, and {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{cannot}: it has no revision '{name.revision}'"
    if isinstance(error, errors.EntryNotFoundError) and status == 404:
        return f"{cannot}: it has no {FILE}, which 'dualmcmc push' writes"
    if status in (401, 403) and writing:
        return f"{cannot}: {log_in}, with a token that may write there ({first_line(error)})"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return f"{cannot}: it does not exist, or is private; if it is private, {log_in}"
    if status in (401, 403):
        return f"{cannot}: the Hub refuses the token; {log_in}"
    if status is not None:
        return f"{cannot}: {constants.ENDPOINT} answers {status}"
    if type(error).__module__.startswith("httpx"):  # no answer; httpx or httpx2, as the library's version has it
        where = "" if writing else ", and it is not in the cache"
        return f"{cannot}: {constants.ENDPOINT} cannot be reached ({first_line(error)}){where}"
    return f"{cannot}: {first_line(error)}"
