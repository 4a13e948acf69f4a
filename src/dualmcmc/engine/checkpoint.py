"""Files of weights: safetensors only (nothing in them can run), written atomically, sealed by a checksum.

A full state holds all that is needed to go on exactly; a snapshot holds the three networks to sample
with, and is small. Both carry the run's settings, so either can be read alone.

The checksum, in the header, is of the whole file with 64 zeros in its own place: no bit can change unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dualmcmc.errors import CannotWrite, Damaged, UserError, first_line
from dualmcmc.files import atomic
from dualmcmc.words import plain

FORMAT = "dualmcmc"
VERSION = 2
BLANK = b"0" * 64  # where the checksum goes
SEAL = b'"sha256":"'  # what stands before it: no text inside the header can, its quotes are escaped
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it


def save(path: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Named tensors and plain values in one file."""
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": BLANK.decode(), "info": json.dumps(info)}
    stored = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    with atomic(path) as temporary:
        try:
            safetensors.torch.save_file(stored, temporary, metadata)
        except safetensors.SafetensorError as error:  # a full disk, in its words
            raise CannotWrite(f"cannot write '{path}': {first_line(error).rpartition('error: ')[2]}.") from None
        seal(temporary)


def seal(path: Path) -> None:
    """Put the checksum of a file that has none yet into its place."""
    with open(path, "rb+") as file:
        place = _seal_place(file)
        checksum = _checksum(file, place)
        file.seek(place)
        file.write(checksum.encode())


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote, on the CPU; one clear line if the file is anything else, or has changed since."""
    with _open(path) as file:
        _check_seal(file, path)
        return {name: file.get_tensor(name) for name in file.keys()}, _check_header(file, path)  # noqa: SIM118


def load_info(path: Path) -> dict[str, Any]:
    """The plain values alone, without reading the tensors."""
    with _open(path) as file:
        return _check_header(file, path)


def verify(path: Path) -> None:
    """Raise `Damaged` where the file is not as it was written."""
    with _open(path) as file:
        _check_seal(file, path)
        _check_header(file, path)


def _check_seal(file: Any, path: Path) -> None:
    """A file without a seal is another program's, or another version's: that is for the header to say."""
    written = (file.metadata() or {}).get("sha256")
    if written is None:
        return
    with open(path, "rb") as content:
        if _checksum(content, _seal_place(content)) != written:
            raise Damaged(f"'{path}' is damaged (its checksum is wrong).")


def _seal_place(file: BinaryIO) -> int:
    """Where in the file the checksum stands."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    place = file.read(min(length, LONGEST_HEADER)).find(SEAL)
    if place < 0:
        raise ValueError("its header is damaged")
    return 8 + place + len(SEAL)


def _checksum(file: BinaryIO, place: int) -> str:
    """Of the whole file, with zeros at `place`."""
    file.seek(0)
    found = hashlib.sha256(file.read(place) + BLANK)
    file.seek(place + len(BLANK))
    while part := file.read(1 << 22):
        found.update(part)
    return found.hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'.") from None
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(f"'{path}' is broken or no checkpoint ({first_line(error)}).") from None


def _check_header(file: Any, path: Path) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise UserError(f"'{path}' was not written by dualmcmc.")
    if metadata.get("version") != str(VERSION):
        raise UserError(
            f"'{path}' is of format {plain(str(metadata.get('version')))}, this dualmcmc reads {VERSION}: "
            "use the version that wrote it."
        )
    try:
        info = json.loads(metadata["info"])
    except (KeyError, ValueError, RecursionError):
        info = None
    if "sha256" not in metadata or not isinstance(info, dict) or not isinstance(info.get("images"), int):
        raise Damaged(f"'{path}' is broken (its header is damaged).")
    return info


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names moved under `prefix`."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors below `prefix`, without it."""
    start = f"{prefix}."
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}


def fill(net: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load a network's tensors; one clear line if they belong to another network."""
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise UserError(f"'{path}' does not fit these networks: {plain(detail, 200)}") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's moments and counters under 'parameter.name'."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value) for index, entry in state.items() for name, value in entry.items()
    }


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` back."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value.clone()  # load_state_dict would share it
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
