"""Checkpoint files: safetensors only (nothing in them is executable), written atomically, with a checksum.

A full state contains everything needed to resume exactly; a snapshot contains only the three networks. Both include the
run's settings, so either can be read alone.

The checksum, in the header, covers the whole file with 64 zeros in its own place.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dualmcmc.utils.errors import CannotWrite, Damaged, UserError, first_line, sanitize
from dualmcmc.utils.files import atomic, open_regular

FORMAT = "dualmcmc"
VERSION = 2
PLACEHOLDER = b"0" * 64  # of the checksum
CHECKSUM_KEY = b'"sha256":"'  # precedes it; no string inside the header contains this, since quotes are escaped
MAX_HEADER = 100_000_000  # bytes, safetensors' own limit


def save(path: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Write named tensors and plain values into one file."""
    metadata = {"format": FORMAT, "version": str(VERSION), "sha256": PLACEHOLDER.decode(), "info": json.dumps(info)}
    stored = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    owners = Counter(value.untyped_storage().data_ptr() for value in stored.values())
    for name, value in stored.items():
        if owners[value.untyped_storage().data_ptr()] > 1:  # tied weights, which safetensors refuses
            stored[name] = value.clone()
    with atomic(path) as temporary:
        try:
            safetensors.torch.save_file(stored, temporary, metadata)
        except safetensors.SafetensorError as error:  # such as a full disk
            raise CannotWrite(f"cannot write '{path}': {first_line(error).rpartition('error: ')[2]}.") from None
        _sort_metadata(temporary)
        write_checksum(temporary)


def _sort_metadata(path: Path) -> None:
    """Make the file depend on its contents alone: safetensors writes the metadata in a random order."""
    with open(path, "rb+") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) == length:  # otherwise this version of safetensors writes JSON in another way
            file.seek(8)
            file.write(text)


def write_checksum(path: Path) -> None:
    """Replace the placeholder in a file by its checksum."""
    with open(path, "rb+") as file:
        place = _checksum_offset(file)
        checksum = _checksum(file, place)
        file.seek(place)
        file.write(checksum.encode())


class Checkpoint(NamedTuple):
    """What `save` wrote, and the SHA-256 of the file."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]
    sha256: str


def load(path: Path) -> Checkpoint:
    """Read what `save` wrote, on the CPU; raises `UserError` if the file is anything else or has changed.

    The file is opened once: a run in training may replace it meanwhile.
    """
    with _open(path) as (file, content):
        _verify_checksum(file, content, path)
        info = _check_header(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content.seek(0)
        return Checkpoint(tensors, info, hashlib.file_digest(content, "sha256").hexdigest())


def load_info(path: Path) -> dict[str, Any]:
    """Read the plain values only."""
    with _open(path) as (file, _):
        return _check_header(file, path)


def verify(path: Path) -> None:
    """Raise `Damaged` if the file has changed since it was written."""
    with _open(path) as (file, content):
        _verify_checksum(file, content, path)
        _check_header(file, path)


def _verify_checksum(file: Any, content: BinaryIO, path: Path) -> None:
    """A file without a checksum is another program's or version's, which `_check_header` reports."""
    written = (file.metadata() or {}).get("sha256")
    if written is not None and _checksum(content, _checksum_offset(content)) != written:
        raise Damaged(f"'{path}' is damaged (wrong checksum).")


def _checksum_offset(file: BinaryIO) -> int:
    """The position of the checksum in the file."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    place = file.read(min(length, MAX_HEADER)).find(CHECKSUM_KEY)
    if place < 0:
        raise ValueError("its header is damaged")
    return 8 + place + len(CHECKSUM_KEY)


def _checksum(file: BinaryIO, place: int) -> str:
    """SHA-256 of the whole file, with zeros at `place`."""
    file.seek(0)
    found = hashlib.sha256(file.read(place) + PLACEHOLDER)
    file.seek(place + len(PLACEHOLDER))
    while part := file.read(1 << 22):
        found.update(part)
    return found.hexdigest()


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, io.BufferedReader]]:
    """The file for safetensors, and the same file for reading bytes."""
    with open_regular(path) as content:
        try:
            with safetensors.safe_open(f"/dev/fd/{content.fileno()}", framework="pt") as file:
                yield file, content
        except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise Damaged(f"'{path}' is damaged or not a checkpoint ({first_line(error)}).") from None


def _check_header(file: Any, path: Path) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise UserError(f"'{path}' was not written by dualmcmc.")
    if metadata.get("version") != str(VERSION):
        raise UserError(
            f"'{path}' has format {sanitize(str(metadata.get('version')))}, this version of dualmcmc reads {VERSION}: "
            "use the version that wrote it."
        )
    try:
        info = json.loads(metadata["info"])
    except (KeyError, ValueError, RecursionError):
        info = None
    if "sha256" not in metadata or not isinstance(info, dict) or not isinstance(info.get("images"), int):
        raise Damaged(f"'{path}' is damaged (invalid header).")
    return info


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with `prefix.` added to their names."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names start with `prefix.`, without it."""
    start = f"{prefix}."
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)}


def load_into(net: nn.Module, tensors: dict[str, Tensor], path: Path, what: str = "its networks") -> None:
    """Load a network's tensors; raises `UserError` if they belong to another architecture or are unusable.

    Values must be finite where the network's own are; a buffer may be a mask of -inf.
    """
    for name, own in net.state_dict().items():
        value = tensors.get(name, own)
        if value.dtype != own.dtype and not (value.is_floating_point() and own.is_floating_point()):
            kinds = f"{_dtype_name(value)} instead of {_dtype_name(own)}"
            raise UserError(f"'{path}' does not match {what}: {sanitize(name)} is {kinds}.")
        if value.shape == own.shape and not (value.to(own).isfinite() | ~own.isfinite()).all():
            raise UserError(f"'{path}' is unusable: {sanitize(name)} has values that are not finite.")
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise UserError(f"'{path}' does not match {what}: {sanitize(detail, 200)}") from None


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def optimizer_tensors(optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    """The state of an Adam optimizer, named INDEX.NAME; without first moments of decay rate 0, the last gradients."""
    state = optimizer.state_dict()
    memoryless = {index for group in state["param_groups"] if group["betas"][0] == 0 for index in group["params"]}
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, entry in state["state"].items()
        for name, value in entry.items()
        if not (name == "exp_avg" and index in memoryless)
    }


def load_optimizer(optimizer: torch.optim.Adam, tensors: dict[str, Tensor]) -> None:
    """Load `optimizer_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value.clone()  # load_state_dict would share it
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state.items():
        entry.setdefault("exp_avg", torch.zeros_like(entry["exp_avg_sq"]))  # see `optimizer_tensors`
        for part, value in entry.items():
            if value.shape != (() if part == "step" else parameters[number].shape):
                raise ValueError(f"the optimizer's {sanitize(part)} has another shape")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
