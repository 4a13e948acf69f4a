"""Everything a run is at one moment, and how it goes to disk and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dualmcmc import rng, settings
from dualmcmc.config import Adam, Config
from dualmcmc.crew import ALONE, Crew
from dualmcmc.engine import checkpoint
from dualmcmc.engine.ema import MovingAverage
from dualmcmc.engine.folder import RunFolder
from dualmcmc.errors import Damaged, UserError
from dualmcmc.methods.dual_mcmc import Optimizers
from dualmcmc.nets import Trio, build
from dualmcmc.nets.batchnorm import BatchNorm2d, share_statistics


class TrainState:
    """Networks, optimizers, moving average, random numbers, and how far the run has come.

    The learning rates and the data order are functions of `images`, so they need no state of their own. Every
    process of a crew has the same state.
    """

    def __init__(self, config: Config, device: torch.device, data: str = "", crew: Crew = ALONE) -> None:
        self.config, self.device, self.data = config, device, data  # data: the fingerprint of the training images
        self.crew = crew
        self.trio = build(config).to(device).train()
        if crew.world > 1 and config.engine.sync_batchnorm:
            share_statistics(self.trio)
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
        self.rollbacks = 0  # after divergence
        self.learning_rates: dict[str, float] = {}  # as they were last set

    def set_learning_rates(self, epoch: int) -> None:
        """lr * lr_decay^epoch for each network, less while they rise and fall."""
        train = self.config.train
        rate = self.config.optim.rate(self.images, train.batch, train.images)
        for name, optimizer in self.optimizers._asdict().items():
            cfg: Adam = getattr(self.config.optim, name)
            now = self.learning_rates[name] = cfg.lr * cfg.lr_decay**epoch * rate
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(now)
                else:
                    group["lr"] = now

    def is_finite(self) -> bool:
        """Whether every number of the networks is."""
        return all(bool(value.isfinite().all()) for value in self.trio.state_dict().values())

    def settle(self) -> None:
        """Before it is saved, all processes together: average what each has counted by itself, compare the rest."""
        if self.crew.world == 1:
            return
        for net in (self.trio, self.ema.nets):
            for module in net.modules():
                if isinstance(module, BatchNorm2d):
                    for statistic in (module.get_buffer("running_mean"), module.get_buffer("running_var")):
                        self.crew.sum_(statistic).div_(self.crew.world)
        named = {**self.trio.state_dict(), **self.ema.nets.state_dict(prefix="ema.")}
        sums = torch.stack([value.double().sum() for value in named.values()]).tolist()
        for rank, others in enumerate(self.crew.gather(sums)):
            apart = [name for name, mine, other in zip(named, sums, others, strict=True) if mine != other]
            if apart:
                raise UserError(
                    f"processes {self.crew.rank} and {rank} no longer have the same {apart[0]}: nothing is saved. "
                    "--resume goes on from the last saved state; are all machines and their libraries alike?"
                )

    def save(self, path: Path) -> None:
        """The full state, enough to go on exactly."""
        tensors = checkpoint.with_prefix("nets", self.trio.state_dict())
        tensors |= checkpoint.with_prefix("ema", self.ema.nets.state_dict())
        for name, optimizer in self.optimizers._asdict().items():
            tensors |= checkpoint.with_prefix(f"optim.{name}", checkpoint.optimizer_tensors(optimizer))
        rng_tensors, rng_plain = rng.capture(self.rng)
        tensors |= checkpoint.with_prefix("rng", rng_tensors)
        plain = {"rng": rng_plain, "seconds": self.seconds, "data": self.data, "rollbacks": self.rollbacks}
        checkpoint.save(path, tensors, self._info() | plain)

    def save_snapshot(self, path: Path) -> None:
        """The three networks to sample with, averaged where there is an average."""
        info = self._info() | {"ema": sorted(self.ema.nets.keys())}
        checkpoint.save(path, self.ema.sampling_trio().state_dict(), info)

    def load(self, path: Path) -> bool:
        """Go back to a saved state; False if the noise stream could not be continued (other device)."""
        tensors, info = self.crew.from_first(lambda: checkpoint.load(path))  # others may not see the folder
        with self.crew.alike():
            return self._fill(tensors, info, path)

    def _fill(self, tensors: dict[str, torch.Tensor], info: dict[str, Any], path: Path) -> bool:
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
            self.rollbacks = info["rollbacks"]
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


def newest_sound(folder: RunFolder) -> tuple[Path, list[Path]]:
    """The newest full state that is as it was written; and those after it that are not."""
    damaged: list[Path] = []
    for path in reversed(folder.saved_states()):
        try:
            checkpoint.verify(path)
        except Damaged as error:
            reason = error
            damaged.append(path)
        else:
            return path, damaged
    if damaged:
        raise UserError(f"{reason} No state of the run is sound: it has to be trained anew, with another --out.")
    return folder.latest_state(), []


def read_config(path: Path) -> Config:
    """The settings inside a state or snapshot, which are the ones it was trained with."""
    return settings.from_tree(checkpoint.load_info(path).get("config"), f"'{path}'")


def load_live_trio(path: Path) -> tuple[Config, Trio]:
    """The networks as trained, without averaging, from a full state."""
    config = read_config(path)
    tensors, _ = checkpoint.load(path)
    return config, build_filled(config, checkpoint.under("nets", tensors), path)


def check_size(config: Config, path: Path) -> None:
    """Refuse a small file that asks for huge networks, before they are made."""
    bare = replace(config, nets=replace(config.nets, spectral_norm=False))  # it adds little, and computes at once
    with torch.device("meta"):  # sizes without the memory
        wanted = sum(2 * value.numel() for value in build(bare).state_dict().values())  # float16 is the coarsest
    held = path.stat().st_size
    if wanted > held:
        raise UserError(f"'{path}' does not fit these networks: they take at least {wanted:,} bytes, it has {held:,}.")


def build_filled(config: Config, tensors: dict[str, torch.Tensor], path: Path) -> Trio:
    """The networks a config asks for, with weights from a file."""
    check_size(config, path)
    trio = build(config)
    checkpoint.fill(trio, tensors, path)
    return trio
