"""The complete state of a run at one moment, and how it is saved and restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dualmcmc import config_io, rng
from dualmcmc.config import Adam, Config, Ema
from dualmcmc.data.store import ImageStore
from dualmcmc.engine import checkpoint
from dualmcmc.engine.ddp import convert_sync_batchnorm
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.run_folder import RunFolder, locate_snapshot
from dualmcmc.methods import Optimizers, load_method
from dualmcmc.nets import Prior, Trio, build
from dualmcmc.nets.custom import Networks, as_trio, check_networks, copied
from dualmcmc.nets.signal import normalize_signal
from dualmcmc.utils.device import available_memory, format_bytes
from dualmcmc.utils.errors import Damaged, UserError, sanitize
from dualmcmc.utils.images import as_float

SIGNAL_IMAGES = 64  # spread over the training set
PRIOR = "prior"  # prefix of a fitted prior's tensors in snapshots
MAX_COUNT = 10**15  # of iterations, images or seconds


class EMA:
    """Exponential moving averages of some networks of a trio; `nets` maps a network's name to its averaged copy."""

    def __init__(self, trio: Trio, cfg: Ema) -> None:
        self.trio, self.cfg = trio, cfg
        averaged = ("generator", "energy") if cfg.energy else ("generator",)
        names = [name for name, _ in trio.named_children() if cfg.half_life and name in averaged]
        self.nets = nn.ModuleDict(
            {name: copied(trio.get_submodule(name), name).eval().requires_grad_(False) for name in names}
        )
        self._weight = next(trio.parameters()).new_zeros(())  # of the current parameters

    def set_decay(self, images: int, batch: int) -> None:
        """Set the decay for the next update, after `images` images in batches of `batch`."""
        half_life = min(self.cfg.half_life, self.cfg.rampup * images) if self.cfg.rampup < 1 else self.cfg.half_life
        self._weight.fill_(1 - (0.5 ** (batch / half_life) if half_life else 0.0))

    @torch.no_grad()
    def update(self) -> None:
        """Average in the current parameters. Works on device tensors only, so a CUDA graph can contain it."""
        for name, average in self.nets.items():
            current = self.trio.get_submodule(name)
            for mean, parameter in zip(average.parameters(), current.parameters(), strict=True):
                mean.lerp_(parameter, self._weight)
            for kept, buffer in zip(average.buffers(), current.buffers(), strict=True):
                kept.copy_(buffer)

    def sampling_trio(self) -> Trio:
        """The networks to sample with, averaged if there is an average. They share storage with the originals."""
        averages = dict(self.nets.items())
        return Trio(**{name: averages.get(name, net) for name, net in self.trio.named_children()})


class TrainState:
    """Networks, optimizers, EMA, random generators and progress; identical on every rank.

    Learning rates and data order are functions of `images`, so they need no state of their own. `networks`, if given,
    are trained in place of those that `config.nets` describes. `images` in the training set, for methods with a memory
    per image.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        data: str = "",
        world: World = SINGLE_PROCESS,
        networks: Trio | None = None,
        images: int = 0,
    ) -> None:
        self.config, self.device, self.data = config, device, data  # data: fingerprint of the training images
        self.world = world
        self.trio = (build(config) if networks is None else networks).to(device).train()
        if world.size > 1 and config.engine.sync_batchnorm:
            convert_sync_batchnorm(self.trio)
        optim = config.optim
        self._adams = {name: _adam(net, getattr(optim, name)) for name, net in self.trio.named_children()}
        self.optimizers = Optimizers(**self._adams)
        self._finite = [name for name, value in self.trio.state_dict().items() if bool(value.isfinite().all())]
        self.ema = EMA(self.trio, config.ema)
        rng.seed_globals(rng.derive_seed(config.seed, rng.Stream.GLOBALS))
        self.rng = rng.make_generator(rng.derive_seed(config.seed, rng.Stream.METHOD), device)
        self.memory = self._initial_memory(images)  # of the method; updated in place
        self.iteration = 0
        self.images = 0
        self.seconds = 0.0  # of training, over all sessions
        self.rollbacks = 0  # after divergence
        self.learning_rates: dict[str, float] = {}  # as last set

    def _initial_memory(self, images: int) -> dict[str, torch.Tensor]:
        config, method = self.config, load_method(self.config.method)
        what = config.teaching, config.data.sample_shape, images
        needed = method.memory_size(*what)
        free = min(available_memory(), available_memory(self.device))  # it is drawn on the CPU
        if needed > free:
            raise UserError(
                f"method={config.method} keeps {format_bytes(needed)} in memory, {format_bytes(free)} are free: reduce "
                "teaching.buffer_size or data.size."
            )
        return method.initial_memory(*what, rng.derive_seed(config.seed, rng.Stream.MEMORY), self.device)

    def load_weights(self, target: str) -> dict[str, Any]:
        """Start from the networks of another run (`train.init`); returns which they are."""

        def read() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            path, origin = locate_snapshot(target)
            tensors, info, sha256 = load_snapshot(path)
            theirs, ours = stored_config(info, path), self.config
            if theirs.networks != ours.networks:
                raise UserError(
                    f"'{origin}' trained {' and '.join(theirs.networks)} (method={theirs.method}), and "
                    f"method={ours.method} trains {' and '.join(ours.networks)}: train.init needs a run with the same "
                    "networks."
                )
            return tensors, {"file": origin, "sha256": sha256, "images": info["images"]}

        tensors, source = self.world.on_main(read)  # other ranks may not see the file
        with self.world.fail_together():
            tensors = {name: value for name, value in tensors.items() if not name.startswith(f"{PRIOR}.")}
            checkpoint.load_into(self.trio, tensors, Path(source["file"]), "the networks of the new run")
        self.ema = EMA(self.trio, self.config.ema)
        return source

    def share_weights(self) -> None:
        """Use rank 0's weights everywhere: the networks of a caller may be initialised differently on each rank."""
        if self.world.size > 1:
            weights = self.world.on_main(lambda: {name: value.cpu() for name, value in self.trio.state_dict().items()})
            self.trio.load_state_dict(weights)
            self.ema = EMA(self.trio, self.config.ema)

    def normalize_energy(self, images: ImageStore) -> None:
        """Set E's gains from some of the training images; a new run with `nets.energy_slope` does so once."""
        slope, energy = self.config.nets.energy_slope, self.trio.energy
        if slope is None or energy is None:
            return

        def gains() -> dict[str, torch.Tensor]:
            count = min(SIGNAL_IMAGES, len(images))
            x = as_float(images.take(np.linspace(0, len(images) - 1, count).astype(np.int64)).to(self.device))
            normalize_signal(energy, x, slope)
            return {name: value.cpu() for name, value in energy.named_buffers()}

        for name, value in self.world.on_main(gains).items():
            energy.get_buffer(name).copy_(value)
        self.ema = EMA(self.trio, self.config.ema)

    def set_learning_rates(self, epoch: int) -> None:
        """lr * lr_decay^epoch for each network, times the schedule's factor."""
        train = self.config.train
        factor = self.config.optim.lr_factor(self.images, train.batch, train.images)
        for name, optimizer in self._adams.items():
            cfg: Adam = getattr(self.config.optim, name)
            lr = self.learning_rates[name] = cfg.lr * cfg.lr_decay**epoch * factor
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def is_finite(self) -> bool:
        """Whether all parameters of the networks, and those of their buffers that were finite at first, are finite."""
        values = self.trio.state_dict()
        return all(bool(values[name].isfinite().all()) for name in self._finite)

    def synchronize(self) -> None:
        """Before saving, on all ranks: average BatchNorm's running statistics, verify that the rest is identical."""
        if self.world.size == 1:
            return
        for net in (self.trio, self.ema.nets):
            for module in net.modules():
                if isinstance(module, _BatchNorm) and module.running_mean is not None:
                    for statistic in (module.get_buffer("running_mean"), module.get_buffer("running_var")):
                        self.world.all_reduce_(statistic).div_(self.world.size)
            if self.config.nets.kind == "custom":
                self._share_buffers(net)
        named = {**self.trio.state_dict(), **self.ema.nets.state_dict(prefix="ema."), **self.memory}
        sums = torch.stack([value.double().sum() for value in named.values()]).tolist()
        for rank, others in enumerate(self.world.all_gather(sums)):
            different = [name for name, mine, other in zip(named, sums, others, strict=True) if mine != other]
            if different:
                raise UserError(
                    f"ranks {self.world.rank} and {rank} have different values of {different[0]}: nothing was saved. "
                    "Continue from the last saved state with --resume, and check that all machines have the same "
                    "hardware and library versions."
                )

    def _share_buffers(self, net: nn.Module) -> None:
        """Use rank 0's buffers everywhere: a custom module may compute some from its own part of the batch."""
        values = self.world.on_main(lambda: {name: value.cpu() for name, value in net.named_buffers()})
        for name, buffer in net.named_buffers():
            buffer.copy_(values[name])

    def save(self, path: Path) -> None:
        """Save the full state, enough to resume exactly."""
        tensors = checkpoint.with_prefix("nets", self.trio.state_dict())
        tensors |= checkpoint.with_prefix("ema", self.ema.nets.state_dict())
        for name, optimizer in self._adams.items():
            tensors |= checkpoint.with_prefix(f"optim.{name}", checkpoint.optimizer_tensors(optimizer))
        tensors |= checkpoint.with_prefix("memory", self.memory)
        rng_tensors, rng_plain = rng.capture(self.rng)
        tensors |= checkpoint.with_prefix("rng", rng_tensors)
        plain = {"rng": rng_plain, "seconds": self.seconds, "data": self.data, "rollbacks": self.rollbacks}
        checkpoint.save(path, tensors, self._info() | plain)

    def save_snapshot(self, path: Path) -> None:
        """Save the networks to sample with, averaged if there is an average."""
        info = self._info() | {"ema": sorted(self.ema.nets.keys())}
        checkpoint.save(path, self.ema.sampling_trio().state_dict() | prior_tensors(self.prior()), info)

    def prior(self) -> Prior | None:
        """The prior that the method has fitted; None if it is N(0, I)."""
        return _fitted_prior(self.config, self.memory)

    def load(self, path: Path) -> bool:
        """Restore a saved state; False if its noise stream cannot continue on this type of device."""
        tensors, info, _ = self.world.on_main(lambda: checkpoint.load(path))  # other ranks may not see the folder
        with self.world.fail_together():
            return self._restore(tensors, info, path)

    def _restore(self, tensors: dict[str, torch.Tensor], info: dict[str, Any], path: Path) -> bool:
        if "rng" not in info:
            raise UserError(f"'{path}' is not a full training state: a snapshot cannot be resumed.")
        if info.get("data") != self.data:
            raise UserError(f"'{path}' was trained on other data: a run must resume on the same data.")
        checkpoint.load_into(self.trio, checkpoint.strip_prefix("nets", tensors), path)
        checkpoint.load_into(self.ema.nets, checkpoint.strip_prefix("ema", tensors), path)
        try:
            for name, optimizer in self._adams.items():
                checkpoint.load_optimizer(optimizer, checkpoint.strip_prefix(f"optim.{name}", tensors))
            for name, value in self.memory.items():
                value.copy_(tensors[f"memory.{name}"])
            self.iteration, self.images, self.rollbacks = (
                _count(info[name], name, int) for name in ("iteration", "images", "rollbacks")
            )
            self.seconds = _count(info["seconds"], "seconds", int, float)
            same_noise = rng.restore(self.rng, checkpoint.strip_prefix("rng", tensors), info["rng"])
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"'{path}' is damaged ({error}). Delete it to resume from the previous state.") from None
        if not same_noise:  # a new stream, not a repetition of the first
            self.rng.manual_seed(rng.derive_seed(self.config.seed, rng.Stream.METHOD, self.images))
        return same_noise

    def _info(self) -> dict[str, Any]:
        return {"config": config_io.to_tree(self.config), "iteration": self.iteration, "images": self.images}


def _count(value: Any, name: str, *kinds: type) -> Any:
    """A stored count, if it can be one."""
    if type(value) not in kinds or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} is not a count")
    return value


def _adam(net: torch.nn.Module, cfg: Adam) -> torch.optim.Adam:
    device = next(net.parameters()).device
    on_gpu = device.type == "cuda"  # fused and capturable: one kernel per network, nothing on the host
    return torch.optim.Adam(
        net.parameters(),
        lr=torch.tensor(cfg.lr, device=device) if on_gpu else cfg.lr,
        betas=cfg.betas,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        fused=on_gpu,
        capturable=on_gpu,
    )


def latest_valid_state(folder: RunFolder) -> tuple[Path, list[Path]]:
    """The newest full state with a correct checksum, and the damaged ones after it."""
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
        raise UserError(f"{reason} All saved states of the run are damaged: train again with another --out.")
    return folder.latest_state(), []


def read_config(path: Path) -> Config:
    """The settings stored in a state or snapshot: those it was trained with."""
    return stored_config(checkpoint.load_info(path), path)


def stored_config(info: dict[str, Any], path: Path) -> Config:
    """The settings among the plain values of a state or snapshot."""
    return config_io.from_stored_tree(info.get("config"), f"'{path}'")


def load_snapshot(path: Path) -> checkpoint.Checkpoint:
    """Read a snapshot: the three networks."""
    snapshot = checkpoint.load(path)
    if "rng" in snapshot.info:
        raise UserError(f"'{path}' is a full training state: use the run folder or its snapshot.")
    return snapshot


def load_state_without_ema(path: Path) -> checkpoint.Checkpoint:
    """Read the networks of a full state as trained, without averaging."""
    state = checkpoint.load(path)
    memory = checkpoint.strip_prefix("memory", state.tensors)
    prior = prior_tensors(_fitted_prior(stored_config(state.info, path), memory))
    return state._replace(tensors=checkpoint.strip_prefix("nets", state.tensors) | prior)


def _fitted_prior(config: Config, memory: dict[str, torch.Tensor]) -> Prior | None:
    method = load_method(config.method)
    return None if method.prior is None else Prior(*method.prior(memory))


def prior_tensors(prior: Prior | None) -> dict[str, torch.Tensor]:
    """A fitted prior as snapshots contain it, beside the networks."""
    return {} if prior is None else checkpoint.with_prefix(PRIOR, prior._asdict())


def split_prior(
    config: Config, tensors: dict[str, torch.Tensor], path: Path
) -> tuple[dict[str, torch.Tensor], Prior | None]:
    """The tensors of a snapshot's networks, and its fitted prior."""
    networks = {name: value for name, value in tensors.items() if not name.startswith(f"{PRIOR}.")}
    if load_method(config.method).prior is None:
        return tensors, None  # of another method, they fit no network
    found, d = checkpoint.strip_prefix(PRIOR, tensors), config.teaching.latent_dim
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    usable = shapes == {"mean": (d,), "scale": (d, d)} and all(value.isfinite().all() for value in found.values())
    if not usable:
        raise UserError(f"'{path}' is unusable: its prior does not fit method={config.method}.")
    return networks, Prior(**{name: value.float() for name, value in found.items()})


def check_size(config: Config, actual: int, path: Path) -> None:
    """Refuse a file of `actual` bytes whose config describes larger networks, before they are allocated."""
    if config.nets.kind == "custom":
        return
    bare = replace(config, nets=replace(config.nets, spectral_norm=False))  # small, but computed at construction
    with torch.device("meta"):  # shapes without memory
        needed = sum(2 * value.numel() for value in build(bare).state_dict().values())  # 2 bytes: float16
    if needed > actual:
        raise UserError(
            f"'{path}' does not match its networks: they need at least {needed:,} bytes, it has {actual:,}."
        )


def build_from_tensors(
    config: Config, tensors: dict[str, torch.Tensor], path: Path, networks: Networks | None = None
) -> Trio:
    """The networks of a config, or a copy of `networks`, with weights from a file."""
    if networks is None and config.nets.kind == "custom":
        raise UserError(
            f"'{path}' was trained with custom networks ({sanitize(config.nets.classes or 'unnamed', 200)}): "
            "pass them, in Python as networks=Trio(energy, generator, inference), on the command line as --networks."
        )
    if networks is None:
        check_size(config, sum(tensor.nbytes for tensor in tensors.values()), path)
    trio = build(config) if networks is None else _own_copy(networks, config)
    checkpoint.load_into(trio, tensors, path)
    return trio


def _own_copy(networks: Networks, config: Config) -> Trio:
    """The networks that a function builds, or a copy of the caller's, which are not changed."""
    trio = as_trio(networks, config)
    x = torch.zeros(2, *config.data.sample_shape, device=next(trio.parameters()).device)
    check_networks(trio, x, config.teaching.latent_dim)
    if not isinstance(networks, (Trio, Sequence)):
        return trio
    return Trio(**{name: copied(net, name) for name, net in trio.named_children()})
