"""Load a trained run: from its folder, a snapshot, or weights with a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.data import DataSplits
from dualmcmc.data.custom import load_custom
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.run_folder import WeightsFile, locate_run, locate_snapshot
from dualmcmc.engine.state import build_from_tensors, load_snapshot, load_state_without_ema, split_prior, stored_config
from dualmcmc.nets.custom import Networks
from dualmcmc.tasks import results
from dualmcmc.tasks.run import Run
from dualmcmc.utils.device import resolve_device, set_deterministic
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.files import expand_user

OVERRIDABLE = (
    "sampling.", "engine.", "teaching.z_chain.", "data.path=", "data.test_path=", "data.crop=", "data.resize=",
    "data.skip_bad=",
)  # fmt: skip


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    ema: bool = True,
    seed: int = 0,
    overrides: Sequence[str] = (),
    world: World = SINGLE_PROCESS,
    *,
    networks: Networks | None = None,
    data: Any = None,
    test_data: Any = None,
) -> Run:
    """A run from its folder, from a snapshot file, or from weights with a name: pretrained, or hf://USER/NAME[@REVISION].

    ema=False loads the weights as trained instead of their average; this needs the run folder. `overrides` change how
    the run is used: "sampling.steps=70", "sampling.batch=100". `data.crop`, `data.resize` and `data.skip_bad` apply to
    other images than the run's own.

    `networks`: modules like those that were trained, if they are not described by the run's settings; the weights are
    loaded into a copy. `data`, `test_data`: the run's data, if they were passed to `train`; only tasks that use the
    run's own data need them.
    """
    if data is None and test_data is not None:
        raise UserError("test_data is given without data: pass both, or neither.")
    target = world.device(resolve_device(str(device)))
    if ema:
        file, source = locate_snapshot(path)
        tensors, info, sha256 = load_snapshot(file)
    else:
        folder = locate_run(path)
        if isinstance(folder, WeightsFile):
            raise UserError(f"'{folder.source}' contains averaged weights only: --no-ema needs the run folder.")
        file = folder.latest_state()
        source = str(file)
        tensors, info, sha256 = load_state_without_ema(file)
    config = stored_config(info, file)
    tensors, prior = split_prior(config, tensors, file)
    trio = build_from_tensors(config, tensors, file, networks)
    splits = None if data is None else _load_custom(config, data, test_data)
    set_deterministic(target, config.train.deterministic)
    used = _override(config, overrides)
    trained_data = replace(config.data, path=used.data.path, test_path=used.data.test_path)
    return Run(
        used, trio, target, info["images"], seed, file, ema, sha256, world, trained_data, splits, source,
        results.folder_for(expand_user(path)), prior,
    )  # fmt: skip


def _load_custom(config: Config, data: Any, test_data: Any) -> DataSplits:
    """Data passed to `load`, if they have the shape of those that the run was trained on."""
    used, splits = load_custom(config.data, data, test_data)
    if used.sample_shape != config.data.sample_shape:
        raise UserError(
            f"the run was trained on samples of shape {config.data.sample_shape}; those in data have shape "
            f"{used.sample_shape}."
        )
    return splits


def _override(config: Config, overrides: Sequence[str]) -> Config:
    if not overrides:
        return config
    tree = config_io.apply_overrides(config_io.to_tree(config), overrides)
    for text in overrides:
        if not text.startswith(OVERRIDABLE):
            names = ", ".join(name.replace("=", "") + "*" * name.endswith(".") for name in OVERRIDABLE)
            raise UserError(f"'{sanitize(text)}' cannot be changed in a trained run: only {names} can.")
    return config_io.from_tree(tree)
