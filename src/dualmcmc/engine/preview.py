"""Pictures of a run in the making: the same latents each time, so that progress shows."""

from __future__ import annotations

import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.config import Config
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.state import TrainState
from dualmcmc.langevin import revise_x
from dualmcmc.nets.frozen import sampling_mode
from dualmcmc.pictures import before_and_after, save_png

COUNT, COLUMNS = 64, 8


class Preview:
    """Grids of generator samples (left) and their EBM-revised forms (right)."""

    def __init__(self, config: Config, state: TrainState, folder: RunFolder) -> None:
        self.config, self.state, self.folder = config, state, folder

    def write(self) -> Tensor:
        """Write samples/IMAGES.png; returns the (C, h, w) picture. Draws nothing from the run's own rng."""
        source = rng.generator(rng.derive(self.config.seed, rng.Stream.PREVIEW), self.state.device)
        z = torch.randn(COUNT, self.config.teaching.latent_dim, device=self.state.device, generator=source)
        trio = self.state.ema.sampling_trio()
        with sampling_mode(trio, self.config.sampling.batchnorm):
            with torch.no_grad():
                x = trio.generator(z)
            revised = revise_x(trio.energy, x, self.config.sampling_chain, source)
        picture = before_and_after(x, revised, COLUMNS)
        save_png(picture, self.folder.samples / f"{self.state.images:012d}.png")
        return picture
