"""Write the weights of a run into one small file, here or on the Hugging Face Hub."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualmcmc import config_io, hub
from dualmcmc.config import Config
from dualmcmc.engine import checkpoint
from dualmcmc.tasks.card import model_card, updated_card
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.files import digest

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def export(tensors: Mapping[str, Tensor], config: Config, images: int, path: Path, dtype: str) -> dict[str, Any]:
    """Write the weights as `dtype`, and the settings; returns size and relative rounding error.

    Vectors (biases, norms) stay float32: they are small, and spectral norms are computed from them.
    """
    check_dtype(dtype)
    rounded = {name: value.to(DTYPES[dtype]) if value.ndim >= 2 else value for name, value in tensors.items()}
    overflowed = [name for name, value in rounded.items() if (tensors[name].isfinite() & ~value.isfinite()).any()]
    if overflowed:
        raise UserError(f"{overflowed[0]} has values beyond the range of {dtype}: choose another --dtype.")
    checkpoint.save(path, rounded, {"config": config_io.to_tree(config), "images": images})
    # Buffers may be masks of -inf.
    finite = {name: value.double().where(value.isfinite(), 0) for name, value in tensors.items()}
    changed = sum(
        float((rounded[name].double().where(tensors[name].isfinite(), 0) - value).square().sum())
        for name, value in finite.items()
    )
    total = sum(float(value.square().sum()) for value in finite.values())
    return {"dtype": dtype, "bytes": path.stat().st_size, "relative_change": (changed / total) ** 0.5}


def check_dtype(dtype: str) -> None:
    """Raise `UserError` unless weights can be exported as `dtype`."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: use {', '.join(DTYPES)}.")


def push(
    tensors: Mapping[str, Tensor],
    config: Config,
    images: int,
    parameters: Mapping[str, int],
    measured: Sequence[Mapping[str, Any]],
    repo: str,
    dtype: str,
    private: bool,
    branch: str | None,
    message: str | None,
    license: str | None,
    replace_card: bool,
) -> dict[str, Any]:
    """Commit what `export` writes, and a model card with the results `measured`, to a repository on the Hub.

    Of a card that exists, only the generated part is written anew.
    """
    repo = hub.parse_repo(repo)
    if license is not None and not LICENSE.fullmatch(license):
        raise UserError(
            f"--license {sanitize(license)}: use an identifier of the Hub, such as apache-2.0 or cc-by-4.0."
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / hub.FILE
        exported = export(tensors, config, images, file, dtype)
        sha256 = digest(file, "sha256").hexdigest()
        facts = exported | {"sha256": sha256}
        card = model_card(repo, config, parameters, images, facts, measured, license)
        message = message or f"Upload weights after {images:,} {config.data.noun}"

        def update(existing: str) -> str | None:
            if replace_card:
                return card
            if license is not None and f'license: "{license}"' not in existing:
                raise UserError(
                    f"hf://{repo} has a model card that states another licence, or none: edit it, or use "
                    "--replace-card to write a new one."
                )
            return updated_card(card, existing)

        made = hub.upload(repo, file, card, message, update, private, branch)
    name = hub.HubName(repo, made.commit)
    return {"name": str(name), "url": made.url, "card": made.card, **facts}
