"""Files of weights: safetensors only (nothing in them can run), written atomically.

A full state holds all that is needed to go on exactly; a snapshot holds the three networks to sample
with, and is small. Both carry the run's settings, so either can be read alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dualmcmc.errors import UserError
from dualmcmc.files import atomic

FORMAT = "dualmcmc"
VERSION = 1


def save(path: Path, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
    """Named tensors and plain values in one file."""
    metadata = {"format": FORMAT, "version": str(VERSION), "info": json.dumps(info)}
    stored = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    with atomic(path) as temporary:
        safetensors.torch.save_file(stored, temporary, metadata)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote, on the CPU; one clear line if the file is anything else."""
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _check_header(file, path)  # noqa: SIM118


def load_info(path: Path) -> dict[str, Any]:
    """The plain values alone, without reading the tensors."""
    with _open(path) as file:
        return _check_header(file, path)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'.") from None
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"'{path}' is broken or no checkpoint ({reason}).") from None


def _check_header(file: Any, path: Path) -> dict[str, Any]:
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise UserError(f"'{path}' was not written by dualmcmc.")
    if metadata.get("version") != str(VERSION):
        raise UserError(
            f"'{path}' is of format {metadata.get('version')}, this dualmcmc reads {VERSION}: "
            "use the version that wrote it."
        )
    try:
        info = json.loads(metadata["info"])
    except (KeyError, json.JSONDecodeError):
        info = None
    if not isinstance(info, dict) or not isinstance(info.get("images"), int):
        raise UserError(f"'{path}' is broken (its header is damaged).")
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
        raise UserError(f"'{path}' does not fit these networks: {detail[:200]}") from None


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
