from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dualmcmc
from dualmcmc.engine.trainer import train
from tests.conftest import tiny


@pytest.fixture(scope="session")
def learned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`digits` trained for 60 iterations, enough for its chains to improve on where they start."""
    out = tmp_path_factory.mktemp("runs") / "learned"
    wide = ("nets.energy_width=8", "nets.generator_width=8", "nets.inference_width=8", "teaching.latent_dim=8")
    more = ("train.images=3000", "train.batch=50", "train.save_every=3000", "train.sample_every=3000")
    torch.set_num_threads(1)
    train(tiny(*wide, *more), out, "cpu")
    return out


@pytest.fixture
def learned(learned_folder: Path) -> dualmcmc.Run:
    return dualmcmc.load(learned_folder, device="cpu")
