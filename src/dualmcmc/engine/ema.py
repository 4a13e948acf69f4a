"""Moving average of the generator (and, where asked, of the energy)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dualmcmc.config import Ema
from dualmcmc.nets import Trio


class MovingAverage:
    """Averaged copies of some networks of a trio; `nets` maps a network's name to its copy."""

    def __init__(self, trio: Trio, cfg: Ema) -> None:
        self.trio, self.cfg = trio, cfg
        names = (["generator"] + ["energy"] * cfg.energy) if cfg.half_life else []
        self.nets = nn.ModuleDict(
            {name: copy.deepcopy(trio.get_submodule(name)).eval().requires_grad_(False) for name in names}
        )
        self._share = next(trio.parameters()).new_zeros(())

    def set_share(self, images: int, batch: int) -> None:
        """How much the weights after `images` images count, the last `batch` of them new."""
        half_life = min(self.cfg.half_life, self.cfg.rampup * images) if self.cfg.rampup < 1 else self.cfg.half_life
        self._share.fill_(1 - (0.5 ** (batch / half_life) if half_life else 0.0))

    @torch.no_grad()
    def fold_in(self) -> None:
        """Fold in the weights as they are; all numbers are on the device, so that a CUDA graph can do this."""
        for name, average in self.nets.items():
            live = self.trio.get_submodule(name)
            for mine, now in zip(average.parameters(), live.parameters(), strict=True):
                mine.lerp_(now, self._share)
            for own, theirs in zip(average.buffers(), live.buffers(), strict=True):
                own.copy_(theirs)

    def sampling_trio(self) -> Trio:
        """The networks to sample with: averages where there are any. They share storage with these."""
        averaged = dict(self.nets.items())
        return Trio(**{name: averaged.get(name, net) for name, net in self.trio.named_children()})
