"""A run's networks in a small file of their own, to keep or to give away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dualmcmc import settings
from dualmcmc.engine import checkpoint
from dualmcmc.errors import UserError
from dualmcmc.tasks.run import Run

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def export(run: Run, path: Path, dtype: str = "float16") -> dict[str, Any]:
    """Write the weights as `dtype`; says how much that changed them, and how large the file is.

    Vectors (biases, norms) stay float32: they are small, and spectral norms are worked out from them. Where the images
    lay on this machine is left out.
    """
    tensors = run.trio.state_dict()
    coarse = TYPES[dtype]
    small = {name: value.to(coarse) if value.ndim >= 2 else value for name, value in tensors.items()}
    beyond = [name for name, value in small.items() if not value.isfinite().all()]
    if beyond:
        raise UserError(f"{beyond[0]} has numbers that {dtype} cannot hold: choose another --dtype.")
    data = replace(run.config.data, path=None, test_path=None)
    checkpoint.save(path, small, {"config": settings.to_tree(replace(run.config, data=data)), "images": run.images})
    changed = sum(float((small[name].to(value) - value).double().square().sum()) for name, value in tensors.items())
    whole = sum(float(value.double().square().sum()) for value in tensors.values())
    return {"dtype": dtype, "bytes": path.stat().st_size, "relative_change": (changed / whole) ** 0.5}
