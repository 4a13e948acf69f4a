"""The settings of a run that is resumed, and which of them may change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.engine.run_folder import RunFolder, RunLock
from dualmcmc.engine.state import check_size, latest_valid_state, read_config
from dualmcmc.pretrained import has_name
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import expand_user

FIXED = (  # a resumed run cannot change these,
    "seed", "method", "data", "nets", "teaching.latent_dim", "teaching.z_start", "teaching.buffer_size", "ema",
    "train.init",
)  # fmt: skip
FREE = (  # except for where its images are, and what its classes are called
    "data.path", "data.test_path", "data.place", "data.workers", "nets.classes",
)  # fmt: skip


def resumed_config(out: Path, overrides: list[str], preset: str | None = None) -> Config:
    """A run's own settings with overrides; refuses those that would make it a different run.

    `preset`, if the caller named one, must be the run's.
    """
    folder = RunFolder(out)
    folder.require_no_links()  # before the lock file is written
    if not folder.has_states():
        raise nothing_to_resume(folder)
    with RunLock(folder.lock):  # a run in training replaces its states
        state = latest_valid_state(folder)[0]
        old = read_config(state)  # what it was trained with, even if config.yaml was edited
        check_size(old, state.stat().st_size, state)
    if preset is not None and config_io.load_config(preset).preset != old.preset:
        raise UserError(f"the run in '{out}' uses preset '{old.preset}', not '{preset}': name that one, or none.")
    new = config_io.from_tree(config_io.apply_overrides(config_io.to_tree(old), overrides), "the resumed run")
    if _absolute(new.train.init) == old.train.init:  # the same command again, with a relative path
        new = replace(new, train=replace(new.train, init=old.train.init))
    check_unchanged(old, new)
    return new


def check_unchanged(old: Config, new: Config) -> None:
    """Raise `UserError` if the settings would make it a different run."""
    before, after = config_io.flatten(old), config_io.flatten(new)
    for key in before:
        fixed = any(key == name or key.startswith(name + ".") for name in FIXED)
        if fixed and before[key] != after[key] and key not in FREE:
            raise UserError(
                f"a resumed run cannot change {key} from {before[key]} to {after[key]}: start a new run instead."
            )


def nothing_to_resume(folder: RunFolder) -> UserError:
    """Why there is nothing to resume in a folder, and what to do instead."""
    if folder.snapshot.exists():
        return UserError(
            f"'{folder.root}' has no saved state to resume from, but a snapshot: to start a new run from its weights, "
            f"use --init {folder.root} and another --out."
        )
    return UserError(
        f"there is no run to resume in '{folder.root}': omit --resume (in Python resume=True) to start one."
    )


def with_absolute_paths(config: Config, init: bool = True) -> Config:
    """The config as it is stored: a run can be resumed from any working directory. `init` false: keep `train.init`."""
    cfg, train = config.data, config.train
    if init and train.init is not None and not has_name(train.init):
        train = replace(train, init=_absolute(train.init))
    return replace(config, data=replace(cfg, path=_absolute(cfg.path), test_path=_absolute(cfg.test_path)), train=train)


def _absolute(path: str | None) -> str | None:
    return path and str(expand_user(path).absolute())
