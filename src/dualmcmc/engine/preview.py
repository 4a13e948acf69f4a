"""Pictures of a run in the making: the same latents each time, so that progress shows."""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.langevin import revise_x
from dualmcmc.nets.frozen import sampling_mode
from dualmcmc.pictures import before_and_after, save_png

COUNT, COLUMNS = 64, 8


def write_preview(state: TrainState, folder: RunFolder) -> Tensor:
    """Generator samples (left) and their EBM-revised forms (right) as samples/IMAGES.png.

    Returns the (C, h, w) picture. Draws nothing from the run's own rng.
    """
    config = state.config
    source = rng.generator(rng.derive(config.seed, rng.Stream.PREVIEW), state.device)
    z = torch.randn(COUNT, config.teaching.latent_dim, device=state.device, generator=source)
    trio = state.ema.sampling_trio()
    with sampling_mode(trio, config.sampling.batchnorm):
        with torch.no_grad():
            x = trio.generator(z)
        revised = revise_x(trio.energy, x, config.sampling_chain, source)
    picture = before_and_after(x, revised, COLUMNS)
    save_png(picture, folder.samples / f"{state.images:012d}.png")
    return picture
