"""Everything a run is at one moment, and how it goes to disk and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dualmcmc import rng, settings
from dualmcmc.config import Adam, Config
from dualmcmc.engine import checkpoint
from dualmcmc.engine.ema import MovingAverage
from dualmcmc.errors import UserError
from dualmcmc.methods.dual_mcmc import Optimizers
from dualmcmc.nets import Trio, build


class TrainState:
    """Networks, optimizers, moving average, random numbers, and how far the run has come.

    The learning rates and the data order are functions of `images`, so they need no state of their own.
    """

    def __init__(self, config: Config, device: torch.device, data: str = "") -> None:
        self.config, self.device, self.data = config, device, data  # data: the fingerprint of the training images
        self.trio = build(config).to(device).train()
        optim = config.optim
        self.optimizers = Optimizers(
            energy=_adam(self.trio.energy, optim.energy),
            generator=_adam(self.trio.generator, optim.generator),
            inference=_adam(self.trio.inference, optim.inference),
        )
        self.ema = MovingAverage(self.trio, config.ema)
        rng.seed_globals(rng.derive(config.seed, rng.Stream.GLOBALS))
        self.rng = rng.generator(rng.derive(config.seed, rng.Stream.METHOD), device)
        self.iteration = 0
        self.images = 0
        self.seconds = 0.0  # of training, over all sittings
        self.learning_rates: dict[str, float] = {}  # as they were last set

    def set_learning_rates(self, epoch: int) -> None:
        """lr * lr_decay^epoch, for each network."""
        for name, optimizer in self.optimizers._asdict().items():
            cfg: Adam = getattr(self.config.optim, name)
            now = self.learning_rates[name] = cfg.lr * cfg.lr_decay**epoch
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now

    def save(self, path: Path) -> None:
        """The full state, enough to go on exactly."""
        tensors = checkpoint.with_prefix("nets", self.trio.state_dict())
        tensors |= checkpoint.with_prefix("ema", self.ema.nets.state_dict())
        for name, optimizer in self.optimizers._asdict().items():
            tensors |= checkpoint.with_prefix(f"optim.{name}", checkpoint.optimizer_tensors(optimizer))
        rng_tensors, rng_plain = rng.capture(self.rng)
        tensors |= checkpoint.with_prefix("rng", rng_tensors)
        checkpoint.save(path, tensors, self._info() | {"rng": rng_plain, "seconds": self.seconds, "data": self.data})

    def save_snapshot(self, path: Path) -> None:
        """The three networks to sample with, averaged where there is an average."""
        info = self._info() | {"ema": sorted(self.ema.nets.keys())}
        checkpoint.save(path, self.ema.sampling_trio().state_dict(), info)

    def load(self, path: Path) -> bool:
        """Go back to a saved state; False if the noise stream could not be continued (other device)."""
        tensors, info = checkpoint.load(path)
        if "rng" not in info:
            raise UserError(f"'{path}' is not a full training state (a snapshot cannot be resumed).")
        if info.get("data") != self.data:
            raise UserError(f"'{path}' was trained on other images: a run goes on with the data it began with.")
        checkpoint.fill(self.trio, checkpoint.under("nets", tensors), path)
        checkpoint.fill(self.ema.nets, checkpoint.under("ema", tensors), path)
        try:
            for name, optimizer in self.optimizers._asdict().items():
                checkpoint.fill_optimizer(optimizer, checkpoint.under(f"optim.{name}", tensors))
            self.iteration, self.images, self.seconds = info["iteration"], info["images"], info["seconds"]
            same_noise = rng.restore(self.rng, checkpoint.under("rng", tensors), info["rng"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"'{path}' is damaged ({error}). Delete it to go on from the state before it.") from None
        if not same_noise:  # a new stream, not the first one again
            self.rng.manual_seed(rng.derive(self.config.seed, rng.Stream.METHOD, self.images))
        return same_noise

    def _info(self) -> dict[str, Any]:
        return {"config": settings.to_tree(self.config), "iteration": self.iteration, "images": self.images}


def _adam(net: torch.nn.Module, cfg: Adam) -> torch.optim.Adam:
    device = next(net.parameters()).device
    on_gpu = device.type == "cuda"  # one kernel a network, and nothing of it on the host: a CUDA graph can hold it
    return torch.optim.Adam(
        net.parameters(),
        lr=torch.tensor(cfg.lr, device=device) if on_gpu else cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=on_gpu,
        capturable=on_gpu,
    )


def read_config(path: Path) -> Config:
    """The settings inside a state or snapshot, which are the ones it was trained with."""
    return settings.from_tree(checkpoint.load_info(path).get("config"), f"'{path}'")


def load_live_trio(path: Path) -> tuple[Config, Trio]:
    """The networks as trained, without averaging, from a full state."""
    config = read_config(path)
    tensors, _ = checkpoint.load(path)
    trio = build(config)
    checkpoint.fill(trio, checkpoint.under("nets", tensors), path)
    return config, trio
