"""All settings, as one typed tree of dataclasses.

Defaults are the paper's equations with the authors' chains, networks and optimizers; a preset (`presets/*.yaml`) lists
what an experiment changes. Every field has a help text and, where it makes sense, limits. `config_io.py` builds the
tree from presets, YAML and KEY=VALUE, and prints it with comments.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal

from dualmcmc.utils.errors import UserError, format_value
from dualmcmc.utils.geometry import MAX_SIZE, downsampling_stages
from dualmcmc.utils.tree import Tree


def setting(default: Any, doc: str, **limits: float) -> Any:
    """A field with its help text and optional limits (gt, ge, lt, le)."""
    return field(default=default, metadata={"doc": doc, **limits})


def group(cls: Any, doc: str, **changes: Any) -> Any:
    """A subtree of settings."""
    return field(default_factory=lambda: cls(**changes), metadata={"doc": doc})


MAX_STEPS = MAX_BATCH = 1_000_000
MAX_INTEGER, MAX_FLOAT = 10**15, 1e38  # of a setting without its own upper limit; 1e38 is finite in float32
RAMP_STEPS = 10  # of energy_augment_ramp
MIN_SIDE = 8  # pixels
MAX_DIMENSIONS, MAX_VALUES = 8, 1 << 26  # of a sample that is not an image
CHAIN_CHANGES = ("steps", "step_size", "temperature", "metropolis")  # of the x-chain, in `sampling`

DatasetName = Literal[
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "celeba", "celebahq256", "lsun-church",
    "folder", "custom",
]  # fmt: skip
Crop = Literal["center", "none", "celeba108", "celeba128", "celeba140", "celeba148", "celeba178"]
Resize = Literal["lanczos", "bilinear", "bicubic", "box"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
MethodName = Literal[
    "dual-mcmc", "cooperative", "amortized", "triangle", "no-mcmc", "short-run", "persistent", "improved-cd", "vae",
    "wae", "rae", "abp", "sr-abp",
]  # fmt: skip
NETWORKS: dict[MethodName, tuple[str, ...]] = {  # that each method trains
    "dual-mcmc": ("energy", "generator", "inference"),
    "cooperative": ("energy", "generator"),
    "amortized": ("energy", "generator", "inference"),
    "triangle": ("energy", "generator", "inference"),
    "no-mcmc": ("energy", "generator"),
    "short-run": ("energy",),
    "persistent": ("energy",),
    "improved-cd": ("energy",),
    "vae": ("generator", "inference"),
    "wae": ("generator", "inference"),
    "rae": ("generator", "inference"),
    "abp": ("generator",),
    "sr-abp": ("generator",),
}


class Settings(Tree):
    """A group of settings. Types and limits are checked however it is built, so that `Chain(steps=-1)` is refused."""

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, entry.name), _types(type(self))[entry.name]  # type: ignore[arg-type]
            if not _fits(value, kind):
                text = f"must be {_describe(kind)}, not {format_value(_misfit(value, kind))}."
                raise InvalidSetting(type(self).__name__, entry.name, text)
            object.__setattr__(self, entry.name, _plain_number(value, kind))
            if text := _beyond_limits(value, entry.metadata):
                raise InvalidSetting(type(self).__name__, entry.name, text)


class InvalidSetting(UserError):
    """A value that a setting cannot have."""

    def __init__(self, group: str, name: str, problem: str) -> None:
        super().__init__(f"{group}: {name} {problem}")
        self.name, self.problem = name, problem


@cache
def _types(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the declared type of a setting."""
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # X | None
        return value is None or _fits(value, options[0])
    if typing.get_origin(kind) is Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if typing.get_origin(kind) is tuple:
        kinds = tuple_kinds(kind, value)
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _misfit(value: Any, kind: Any) -> Any:
    """What does not have the declared type: the first such item of a tuple of any length, or the whole value."""
    if isinstance(value, tuple) and Ellipsis in typing.get_args(kind):
        return next(item for item in value if not _fits(item, typing.get_args(kind)[0]))
    return value


def tuple_kinds(kind: Any, value: Any) -> tuple[Any, ...]:
    """The types of the items of a tuple: tuple[float, float], or tuple[int, ...] with as many as `value` has."""
    options = typing.get_args(kind)
    if Ellipsis not in options:
        return options
    return options[:1] * (len(value) if isinstance(value, (tuple, list)) else 0)


def _plain_number(value: Any, kind: Any) -> Any:
    """Numbers as Python's own, which can be written to YAML and JSON; the rest as it is."""
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _plain_number(value, options[0])
    if typing.get_origin(kind) is tuple:
        return tuple(map(_plain_number, value, tuple_kinds(kind, value)))
    return kind(value) if kind in (int, float) else value


def _describe(kind: Any) -> str:
    """A type in words."""
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return f"{_describe(options[0])} or None"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, options))
    if typing.get_origin(kind) is tuple:
        if Ellipsis in options:
            return f"a tuple of {'integers' if options[0] is int else _describe(options[0])}"
        return f"a tuple of {len(options)} numbers"
    words = {int: "an integer", float: "a number", bool: "True or False", str: "text"}
    return words.get(kind, f"a {kind.__name__}")


_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("greater than", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("less than", operator.lt),
    "le": ("at most", operator.le),
}


def _beyond_limits(value: Any, metadata: Mapping[str, Any]) -> str:
    """What is wrong with a number, or one of several, that is beyond its limits or beyond every sensible number."""
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, bool) or not isinstance(item, Real):
            continue
        limits = {key: metadata[key] for key in _LIMITS if key in metadata}
        if not limits.keys() & {"lt", "le"}:
            limits["le"] = MAX_INTEGER if isinstance(item, Integral) else MAX_FLOAT
        for key, limit in limits.items():
            words, satisfied = _LIMITS[key]
            if not satisfied(item, limit):
                return f"must be {words} {limit:g}, not {format_value(item)}."
    return ""


@dataclass(frozen=True)
class Data(Settings):
    """Training images."""

    source: DatasetName = setting(
        "digits",
        "named dataset ('dualmcmc data list'); folder: your images at data.path; custom: given to train() in Python",
    )
    path: str | None = setting(
        None, "folder, zip, tar, LMDB, parquet, npz or packed file; null: the named dataset in the cache folder"
    )
    test_path: str | None = setting(
        None, "the same for held-out images; null: the dataset's test split, or data.holdout"
    )
    split: str = setting("train", "split to train on, or several joined by +, such as train+extra")
    holdout: float = setting(0.0, "fraction of images held out if there is no test split", ge=0, lt=1)
    size: int = setting(32, "image side in pixels: 4, 5, 6 or 7 times a power of two", ge=MIN_SIDE, le=MAX_SIZE)
    channels: Literal[1, 3] = setting(3, "1 (greyscale) or 3 (RGB)")
    shape: tuple[int, ...] | None = setting(
        None, "custom: shape of a sample that is not an image of channels x size x size; set by train()", ge=1, le=10**9
    )
    as_images: bool = setting(
        True, "custom: keep samples of shape (C, H, W) with 1 or 3 channels as uint8 images; false: any floats"
    )
    crop: Crop = setting(
        "center", "center: largest central square; none: squeeze the whole image; celebaN: N pixels of CelebA's 178x218"
    )
    resize: Resize = setting("lanczos", "resampling filter: lanczos, bilinear, bicubic or box")
    skip_bad: bool = setting(False, "skip unreadable files with a message; false: refuse them")
    flip: bool = setting(False, "mirror each image with probability 1/2 (not in the paper)")
    place: Literal["auto", "device", "stream"] = setting(
        "auto", "device: keep all images in device memory; stream: read as needed; auto: device if they fit"
    )
    workers: int = setting(4, "reader threads when streaming", ge=1, le=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        downsampling_stages(self.size)
        if self.source == "digits" and (self.path or self.test_path):
            raise UserError(
                "data.path is set, but data.source=digits is built in: add data.source=folder with your data.size and "
                "data.channels, or start from another preset, such as laptop32."
            )
        if self.test_path and self.holdout:
            raise UserError("data.test_path and data.holdout are both set: choose one.")
        if self.shape is not None and (self.source != "custom" or not self.shape):
            raise UserError("data.shape is for data.source=custom, and must not be empty.")
        if self.shape is not None and (len(self.shape) > MAX_DIMENSIONS or math.prod(self.shape) > MAX_VALUES):
            raise UserError(f"data.shape may have {MAX_DIMENSIONS} dimensions and {MAX_VALUES:,} values at most.")
        if self.flip and not self.is_image:
            raise UserError("data.flip=true is for images.")

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a training sample: (C, H, W) of an image."""
        return self.shape or (self.channels, self.size, self.size)

    @property
    def noun(self) -> Literal["images", "samples"]:
        """What the training samples are called."""
        return "images" if self.is_image else "samples"

    @property
    def is_image(self) -> bool:
        """Whether samples are images, with pixels in [-1, 1]."""
        return (self.as_images or self.source != "custom") and is_image_shape(self.sample_shape)


def is_image_shape(shape: tuple[int, ...]) -> bool:
    """Whether this is the shape of an image: (C, H, W) with 1 or 3 channels and at least 8 pixels a side."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= MIN_SIDE


@dataclass(frozen=True)
class Nets(Settings):
    """The three networks."""

    kind: Literal["simple", "resnet", "style", "custom"] = setting(
        "simple",
        "simple: plain convolutions; resnet: residual E and G, as in the paper's main results; style: G as in "
        "StyleGAN2, E plain (not in the paper); custom: your own, the other settings of nets do not apply",
    )
    classes: str | None = setting(
        None, "custom: the classes of the networks, as a note; nothing is imported because of it"
    )
    energy_width: int = setting(64, "channels of E: first layer (simple, style), or nef (resnet)", ge=1, le=16384)
    energy_depth: int = setting(
        1, "convolutions per resolution of E (simple, style); residual blocks always have two", ge=1, le=16
    )
    generator_width: int = setting(
        64, "channels of G: half those of its last stage (simple, style), or nef (resnet)", ge=1, le=16384
    )
    inference_width: int = setting(64, "channels of I's first layer; doubled per stage up to 1024", ge=1, le=16384)
    energy_slope: float | None = setting(
        None,
        "mean |dE/dx| at initialisation, by constant gains in E; null: none (the authors), the slope fades with depth",
        gt=0,
    )
    spectral_norm: bool = setting(True, "spectral normalisation of every layer of E (as in the authors' code)")
    batchnorm_gain: Literal["normal", "ones"] = setting(
        "normal", "initial BatchNorm gains of the resnet G; normal: N(0, 1) as in the authors' code, ones: 1"
    )


@dataclass(frozen=True)
class Chain(Settings):
    """A Langevin chain: u <- u - s dU/du + sqrt(2 s temperature) N(0, I), `steps` times.

    The paper's chains have temperature 1. The authors' code runs a colder x-chain: noise 0.001 per step, which is
    temperature = noise^2 / (2 s) = 4e-6 at its s = 0.125.
    """

    steps: int = setting(30, "number of Langevin steps (k_x or k_z)", ge=0, le=MAX_STEPS)
    step_size: float = setting(0.01, "step size s, the factor of the gradient", gt=0)
    temperature: float = setting(
        1.0, "noise per step is sqrt(2 s temperature); 1: the paper, 0: gradient descent", ge=0
    )
    clamp: float | None = setting(None, "clamp the state to [-clamp, clamp]; null: off (the paper)", gt=0)
    grad_clip: float | None = setting(None, "maximum gradient norm per sample; null: off (the paper)", gt=0)
    metropolis: bool = setting(
        False,
        "accept or reject each step (MALA), so that no step size biases the chain; no effect at temperature 0; "
        "false: the paper",
    )

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise per step; sqrt(2 s) in the paper."""
        return math.sqrt(2.0 * self.step_size * self.temperature)

    def format_steps(self) -> str:
        """Such as "30 steps", or "10 noise-free steps"."""
        return f"{self.steps} {'noise-free ' * (self.temperature == 0)}step{'s' * (self.steps != 1)}"


@dataclass(frozen=True)
class Teaching(Settings):
    """Dual-MCMC teaching: model constants, the two chains, loss weights."""

    latent_dim: int = setting(128, "dimension d of z ~ N(0, I)", ge=1, le=65536)
    sigma: float = setting(0.3, "standard deviation of p(x|z) = N(g(z), sigma^2 I)", ge=1e-4, le=100)
    x_chain: Chain = group(
        Chain, "T_x: revises generator samples on the energy, in training", steps=30, step_size=0.125, temperature=4e-6
    )
    z_chain: Chain = group(
        Chain, "T_z: revises inferred latents on the generator's posterior", steps=10, step_size=0.005
    )
    z_start: Literal["inference", "prior"] = setting(
        "inference",
        "dual-mcmc: initial state of the z-chain; inference: a draw of q(z|x), prior: of N(0, I), without an inference "
        "model (the paper's ablation)",
    )
    start_noise: float = setting(
        0.0, "noise on the x-chain's initial state g(z); sigma: sample p(x|z), 0: the authors", ge=0
    )
    second_x_chain: bool = setting(
        False,
        "dual-mcmc: train E on a second x-chain run after G's update (the authors' code); doubles the x-chain's cost",
    )
    energy_weight: float = setting(1.0, "factor of E's loss; about 2.5e5 in the authors' code, cancelled by Adam", gt=0)
    energy_l2: float = setting(
        0.0, "weight of the L2 penalty on energies, which pulls them to -/+ 1/(2 energy_l2); 0 in the paper", ge=0
    )
    energy_consistency: float = setting(
        0.0, "weight of (E(x) - E(shifted x))^2, against memorising the training set; 0 in the paper", ge=0
    )
    energy_shift: int = setting(4, "energy_consistency: maximum random shift in pixels", ge=1)
    energy_augment: float = setting(
        0.0,
        "probability of each random transformation of the images that E sees, in its loss and in the x-chain "
        "(mirroring, quarter turn, shift, scale, colour); above 0.8 samples may look transformed; 0 in the paper",
        ge=0,
        lt=1,
    )
    energy_augment_ramp: int = setting(
        0, "images over which energy_augment rises from 0 to its value, in ten steps", ge=0
    )
    generator_data_weight: float | None = setting(
        None, "weight of |x - g(z~)|^2; null: the paper's 1/(2 sigma^2); 1 in the authors' code", ge=0
    )
    generator_sample_weight: float | None = setting(
        None, "weight of |x~ - g(z)|^2; null: the paper's 1/(2 sigma^2); 50 (CelebA 70) in the authors' code", ge=0
    )
    inference_data_weight: float = setting(1.0, "dual-mcmc: weight of -log q(z~|x)", ge=0)
    inference_sample_weight: float = setting(
        1.0, "dual-mcmc: weight of -log q(z|x~); 1 in the paper, 0.1 in the authors' code", ge=0
    )
    latent_weight: float = setting(
        1.0, "vae, amortized, triangle: weight of the KL term; wae: of the MMD; rae: of |z|^2 / 2", ge=0
    )
    entropy_weight: float = setting(1.0, "no-mcmc: weight of the generator's entropy", ge=0)
    entropy_samples: int = setting(20, "no-mcmc: latents per image that estimate the entropy's gradient", ge=1, le=1024)
    entropy_spread: float = setting(
        0.1, "no-mcmc: standard deviation of these latents around the image's own; about that of p(z|x)", gt=0
    )
    buffer_size: int = setting(10_000, "persistent, improved-cd: samples in the buffer", ge=1, le=MAX_BATCH)
    restart_probability: float = setting(
        0.05, "persistent, improved-cd: probability that a chain starts again from noise", ge=0, le=1
    )
    divergence_weight: float = setting(1.0, "improved-cd: weight of the loss through the chain's last step", ge=0)

    def with_short_chains(self, steps: int) -> Teaching:
        """The same with chains of at most so many steps."""
        x_chain, z_chain = (replace(chain, steps=min(steps, chain.steps)) for chain in (self.x_chain, self.z_chain))
        return replace(self, x_chain=x_chain, z_chain=z_chain)

    def at(self, images: int) -> Teaching:
        """The settings after `images` images: `energy_augment` as far as the ramp has raised it."""
        if images >= self.energy_augment_ramp:
            return self
        reached = images * RAMP_STEPS // self.energy_augment_ramp / RAMP_STEPS
        return replace(self, energy_augment=reached * self.energy_augment)


@dataclass(frozen=True)
class Adam(Settings):
    """Adam for one network."""

    lr: float = setting(1e-4, "learning rate", gt=0)
    betas: tuple[float, float] = setting((0.0, 0.9), "decay rates of the first and second moment", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "L2 penalty added to the gradient", ge=0)
    lr_decay: float = setting(0.998, "factor of the learning rate per epoch", gt=0, le=1)


@dataclass(frozen=True)
class Optim(Settings):
    """One Adam per network, and the learning-rate schedule."""

    energy: Adam = group(Adam, "Adam of E", lr=1e-4)
    generator: Adam = group(Adam, "Adam of G", lr=3e-4, weight_decay=5e-4)
    inference: Adam = group(Adam, "Adam of I", lr=1e-4, weight_decay=5e-4)
    warmup: int = setting(0, "images of linear learning-rate warm-up (the authors: none)", ge=0)
    cooldown: float = setting(
        0.0,
        "fraction of train.images over which the learning rates decay linearly to 0 (the authors: none)",
        ge=0,
        le=1,
    )

    def lr_factor(self, images: int, batch: int, total: int) -> float:
        """The schedule's factor for the batch that follows `images` of `total` images."""
        rising = (images + batch) / self.warmup if self.warmup else 1.0
        falling = (total - images) / (self.cooldown * total) if self.cooldown else 1.0
        return min(1.0, rising, falling)


@dataclass(frozen=True)
class Ema(Settings):
    """Exponential moving average of the weights, used for sampling."""

    half_life: int = setting(100_000, "half-life in images; 0: no averaging", ge=0)
    rampup: float = setting(0.05, "limit the half-life to this fraction of the images seen; 1: no ramp-up", gt=0, le=1)
    energy: bool = setting(False, "average E too, not only G")


@dataclass(frozen=True)
class Sampling(Settings):
    """How a trained run samples; null means as in training (teaching.x_chain)."""

    steps: int | None = setting(None, "x-chain steps", ge=0, le=MAX_STEPS)
    step_size: float | None = setting(None, "x-chain step size", gt=0)
    temperature: float | None = setting(None, "x-chain temperature", ge=0)
    metropolis: bool | None = setting(None, "accept or reject each step of the x-chain (MALA)")
    batchnorm: Literal["running", "batch"] = setting(
        "running", "BatchNorm statistics: running, or those of each batch as in the authors' code"
    )
    batch: int = setting(500, "images per batch", ge=1, le=MAX_BATCH)


@dataclass(frozen=True)
class Train(Settings):
    """Length of training and output intervals, counted in images, so that the batch size does not change them."""

    batch: int = setting(100, "images per iteration, over all processes", ge=1, le=MAX_BATCH)
    images: int = setting(15_000_000, "images to train on", ge=1)
    init: str | None = setting(
        None,
        "weights to start from: run folder, snapshot, pretrained name or hf://USER/NAME; null: random ones",
    )
    log_every: int = setting(50, "iterations between log lines (the only host syncs)", ge=1, le=10_000)
    sample_every: int = setting(500_000, "images between sample grids", ge=1)
    save_every: int = setting(500_000, "images between saved states", ge=1)
    snapshot_every: int | None = setting(
        None,
        "images between snapshots kept in snapshots/ to measure progress, each with a state; null: none",
        ge=1,
    )
    keep: int = setting(2, "saved states to keep; with 1 there is no fallback for a damaged one", ge=1)
    grace: float = setting(30.0, "seconds after SIGTERM within which the state must be saved", ge=0)
    deterministic: bool = setting(True, "on CUDA: the same seed gives the same run, slightly slower")
    trackers: tuple[TrackerName, ...] = setting(
        ("tensorboard",), "where curves go besides log.jsonl: tensorboard, wandb, mlflow, several or none: []"
    )


@dataclass(frozen=True)
class Engine(Settings):
    """Speed and memory. Results stay the same up to rounding."""

    mode: Literal["auto", "eager", "compiled"] = setting(
        "auto", "eager: plain PyTorch; compiled: fused kernels, and one CUDA graph on GPUs; auto: compiled on CUDA"
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto", "precision of convolutions; auto: bfloat16 if compiled on CUDA, else PyTorch's default (tf32 on CUDA)"
    )
    micro_batch: int | None = setting(
        None, "images per network evaluation, to save memory; also BatchNorm's batch; null: all", ge=1
    )
    threads: int | None = setting(
        None, "CPU threads; null: one per available core, at most 8, or OMP_NUM_THREADS", ge=1, le=1024
    )
    sync_batchnorm: bool = setting(False, "BatchNorm over the images of all processes, in chains too")
    shared_noise: bool = setting(
        True, "each process draws the noise of all, so that their number does not change the run"
    )


@dataclass(frozen=True)
class Guard(Settings):
    """When a run counts as diverged, and what happens then."""

    max_energy_gap: float = setting(1000.0, "largest |E(x~) - E(x)| of batch means", gt=0)
    max_x_displacement: float = setting(10.0, "largest x-chain displacement, rms per pixel or dimension", gt=0)
    max_z_displacement: float = setting(10.0, "largest z-chain displacement, rms per latent dimension", gt=0)
    on_divergence: Literal["stop", "rollback"] = setting(
        "stop", "stop, or rollback: continue from the last valid state with rates reduced by 'backoff'"
    )
    max_rollbacks: int = setting(3, "rollbacks per run before it stops", ge=1)
    backoff: float = setting(0.5, "factor of learning rates and chain step sizes at a rollback", gt=0, lt=1)


@dataclass(frozen=True)
class Config(Settings):
    """All settings of a run."""

    preset: str = setting("", "preset this config is based on")
    description: str = setting("", "what this experiment is")
    seed: int = setting(0, "seed of initial weights, data order and all noise", ge=0, lt=2**63)
    method: MethodName = setting("dual-mcmc", "learning rule; docs/methods.md describes each")
    data: Data = group(Data, Data.__doc__ or "")
    nets: Nets = group(Nets, Nets.__doc__ or "")
    teaching: Teaching = group(Teaching, Teaching.__doc__ or "")
    optim: Optim = group(Optim, Optim.__doc__ or "")
    ema: Ema = group(Ema, Ema.__doc__ or "")
    sampling: Sampling = group(Sampling, Sampling.__doc__ or "")
    train: Train = group(Train, Train.__doc__ or "")
    guard: Guard = group(Guard, Guard.__doc__ or "")
    engine: Engine = group(Engine, Engine.__doc__ or "")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_method()
        teaching, data = self.teaching, self.data
        is_image, shape = data.is_image, data.sample_shape
        if teaching.energy_augment > 0 and not (is_image and shape[1] == shape[2]):
            raise UserError("teaching.energy_augment is for square images.")
        if teaching.energy_consistency > 0 and not is_image:
            raise UserError("teaching.energy_consistency is for images.")
        if teaching.energy_consistency > 0 and teaching.energy_shift >= min(shape[1:]):
            what = f"data.size={data.size}" if data.shape is None else f"the sides of the images, {shape[1:]}"
            raise UserError(f"teaching.energy_shift={teaching.energy_shift} must be smaller than {what}.")

    def _check_method(self) -> None:
        """Raise `UserError` for settings with which the method cannot run, or that it would ignore."""
        teaching, chain = self.teaching, self.teaching.x_chain
        if self.method == "abp" and self.data.flip:
            raise UserError("method=abp keeps a latent per image, so images cannot be mirrored: set data.flip=false.")
        if self.method == "wae" and self.train.batch < 2:
            raise UserError("method=wae compares the latents of a batch: set train.batch=2 or more.")
        if teaching.second_x_chain and self.method != "dual-mcmc":
            raise UserError(f"teaching.second_x_chain=true is for method=dual-mcmc, not for method={self.method}.")
        if self.method == "improved-cd" and (chain.metropolis or chain.grad_clip is not None or chain.steps == 0):
            raise UserError(
                "method=improved-cd learns through the x-chain's last step: teaching.x_chain.steps must be at least 1, "
                "without metropolis and grad_clip."
            )
        if teaching.z_start == "prior" and self.method != "dual-mcmc":
            raise UserError(f"teaching.z_start=prior is for method=dual-mcmc, not for method={self.method}.")

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that the method trains."""
        without_inference = self.method == "dual-mcmc" and self.teaching.z_start == "prior"
        return tuple(name for name in NETWORKS[self.method] if not (without_inference and name == "inference"))

    @property
    def sampling_chain(self) -> Chain:
        """The x-chain of a trained run: training's, with the changes in `sampling`."""
        changes = {name: getattr(self.sampling, name) for name in CHAIN_CHANGES}
        return replace(self.teaching.x_chain, **{name: value for name, value in changes.items() if value is not None})
