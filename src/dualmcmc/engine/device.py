"""Where to compute."""

from __future__ import annotations

import os

import torch

from dualmcmc.errors import UserError, nearest


def pick(name: str = "auto") -> torch.device:
    """The device called `name`; auto is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (name == "cuda" or index.isdecimal())):
        raise UserError(f"unknown device '{name}': use auto, cpu or cuda.{nearest(name, ['auto', 'cpu', 'cuda'])}")
    if name != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch sees no CUDA device. Check the driver and that torch is a CUDA build, "
            "or use --device cpu."
        )
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"there is no device '{name}': PyTorch sees {torch.cuda.device_count()} CUDA device(s).")
    return torch.device(name)


def describe(device: torch.device) -> str:
    """The device in words, for the log."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def make_repeatable(device: torch.device, wanted: bool) -> None:
    """On CUDA, keep to kernels whose result does not depend on the order of execution."""
    if device.type != "cuda":
        return
    torch.backends.cudnn.deterministic = wanted
    torch.backends.cudnn.benchmark = not wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
