"""One typed tree of settings.

Defaults are the paper's equations with the authors' chains, networks and optimizers; a preset
(`presets/*.yaml`) says what an experiment changes. Every field carries its explanation and limits;
`settings.py` builds a tree from what people write, checks it once at the door, and prints it with a
comment on each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dualmcmc.errors import UserError


def setting(default: Any, doc: str, **limits: float) -> Any:
    """A field with its explanation and, where they make sense, its limits (gt, ge, lt, le)."""
    return field(default=default, metadata={"doc": doc, **limits})


def group(cls: Any, doc: str, **changes: Any) -> Any:
    """A sub-tree of settings."""
    return field(default_factory=lambda: cls(**changes), metadata={"doc": doc})


def stages(size: int) -> tuple[int, int]:
    """(base, n) with size = base * 2^n and base in 4..7: the smallest map and the halvings to it.

    8 -> (4, 1), 28 -> (7, 2), 32 -> (4, 3), 64 -> (4, 4), 256 -> (4, 6).
    """
    base, count = size, 0
    while base > 7 and base % 2 == 0:
        base, count = base // 2, count + 1
    if not 4 <= base <= 7 or count == 0:
        raise UserError(
            f"data.size={size} does not fit the networks: use 4, 5, 6 or 7 times a power of two, "
            "such as 8, 28, 32, 64 or 256."
        )
    return base, count


Source = Literal[
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "celeba", "celebahq256", "lsun-church", "folder"
]
Crop = Literal["center", "none", "celeba108", "celeba128", "celeba140", "celeba148", "celeba178"]
Resize = Literal["lanczos", "bilinear", "bicubic", "box"]

# CelebA's usual crops of its 178x218 images: the side of the square and its centre (x, y)
CROPS = {
    "celeba108": (108, 89, 109),  # DCGAN
    "celeba128": (128, 89, 121),  # progressive GANs
    "celeba140": (140, 89, 109),  # score-based and energy-based models
    "celeba148": (148, 89, 109),  # VAEs and WAEs
    "celeba178": (178, 89, 109),  # the full width
}


@dataclass(frozen=True)
class Data:
    """What is learned."""

    source: Source = setting("digits", "a named set ('dualmcmc data list'), or folder: your images at data.path")
    path: str | None = setting(
        None, "folder, zip, tar, LMDB, parquet, npz or packed file; null: the named set in the cache folder"
    )
    test_path: str | None = setting(None, "the same for held-out images; null: the set's test split, or data.holdout")
    split: str = setting("train", "what is trained on: a split, or several joined by +, such as train+extra")
    holdout: float = setting(0.0, "share of the images kept out of training, where no test split is", ge=0, lt=1)
    size: int = setting(32, "side in pixels: 4, 5, 6 or 7 times a power of two", ge=8, le=1024)
    channels: Literal[1, 3] = setting(3, "1 (grey) or 3 (RGB)")
    crop: Crop = setting(
        "center", "center: the largest central square; none: the whole, squeezed; celebaN: N pixels of CelebA's 178x218"
    )
    resize: Resize = setting("lanczos", "how other sizes are resampled: lanczos, bilinear, bicubic or box")
    skip_bad: bool = setting(False, "leave out files that cannot be read, and say which; false: refuse them")
    flip: bool = setting(False, "mirror every image with probability 1/2 (the paper does not)")
    place: Literal["auto", "device", "stream"] = setting(
        "auto", "device: all images in the device's memory; stream: read as needed; auto: device where they fit"
    )
    workers: int = setting(4, "threads that read ahead when streaming", ge=1, le=256)

    def __post_init__(self) -> None:
        stages(self.size)
        if self.source == "digits" and (self.path or self.test_path):
            raise UserError(
                "data.path is given, but data.source=digits comes with its own images: add data.source=folder "
                "and your data.size and data.channels, or start from another preset."
            )
        if self.test_path and self.holdout:
            raise UserError("data.test_path and data.holdout are both given: choose one.")


@dataclass(frozen=True)
class Nets:
    """The three networks."""

    kind: Literal["simple", "resnet"] = setting(
        "simple", "simple: plain convolutions; resnet: residual E and G, as the paper's main results"
    )
    energy_width: int = setting(64, "channels of E: of its first layer (simple), or nef (resnet)", ge=1, le=16384)
    energy_depth: int = setting(1, "convolutions a halving in E (simple); the resnet's blocks have two", ge=1, le=16)
    generator_width: int = setting(
        64, "channels of G: half those of its last stage (simple), or nef (resnet)", ge=1, le=16384
    )
    inference_width: int = setting(
        64, "channels of I's first layer; each stage doubles them, up to 1024", ge=1, le=16384
    )
    spectral_norm: bool = setting(True, "spectral normalisation of every layer of E (as the authors)")
    batchnorm_gain: Literal["normal", "ones"] = setting(
        "normal", "initial BatchNorm gains of the resnet G: N(0,1) as the authors, or 1"
    )


@dataclass(frozen=True)
class Chain:
    """A Langevin chain: u <- u - s dU/du + sqrt(2 s temperature) N(0, I), `steps` times.

    The paper's chain has temperature 1. The authors' code runs a colder one on x: noise of 0.001 per
    step, which is temperature = noise^2 / (2 s) = 4e-6 at its s = 0.125.
    """

    steps: int = setting(30, "Langevin steps (k_x or k_z)", ge=0)
    step_size: float = setting(0.01, "s, the factor of the gradient", gt=0)
    temperature: float = setting(
        1.0, "noise per step is sqrt(2 s temperature): 1 is the paper's chain, 0 gradient descent", ge=0
    )
    clamp: float | None = setting(None, "keep the state within [-clamp, clamp]; null: off (the paper)", gt=0)
    grad_clip: float | None = setting(None, "largest gradient norm of one sample; null: off (the paper)", gt=0)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in one step; sqrt(2s) in the paper (eq:ebm_langevin)."""
        return math.sqrt(2.0 * self.step_size * self.temperature)


@dataclass(frozen=True)
class Teaching:
    """Dual-MCMC teaching: the model's constants, the two chains and the weights of the losses."""

    latent_dim: int = setting(128, "d, the dimension of z ~ N(0, I)", ge=1, le=65536)
    sigma: float = setting(0.3, "generator's standard deviation in p(x|z) = N(g(z), sigma^2 I)", ge=1e-4, le=100)
    x_chain: Chain = group(
        Chain, "T_x: revises generator samples on the energy, in training", steps=30, step_size=0.125, temperature=4e-6
    )
    z_chain: Chain = group(
        Chain, "T_z: revises inferred latents on the generator's posterior", steps=10, step_size=0.005
    )
    start_noise: float = setting(
        0.0, "noise on g(z) where training's x-chain starts: sigma is a draw from p(x|z), the authors use 0", ge=0
    )
    second_x_chain: bool = setting(
        False, "E learns from a second x-chain run after G's update, as the authors' code; doubles the cost"
    )
    energy_weight: float = setting(
        1.0, "factor of E's loss; the authors' code has about 2.5e5, which Adam cancels", gt=0
    )
    energy_l2: float = setting(
        0.0, "of mean E(x)^2 + mean E(x~)^2 in E's loss: draws energies to -/+ 1/(2 energy_l2); 0 in the paper", ge=0
    )
    energy_consistency: float = setting(
        0.0,
        "of mean (E(x) - E(x moved))^2, and the same of x~, in E's loss, lest E learn x by heart; 0 in the paper",
        ge=0,
    )
    energy_shift: int = setting(4, "energy_consistency: pixels by which x and x~ are moved at random, at most", ge=1)
    generator_data_weight: float | None = setting(
        None, "of |x - g(z~)|^2; null: the paper's 1/(2 sigma^2); the authors' code has 1", ge=0
    )
    generator_sample_weight: float | None = setting(
        None, "of |x~ - g(z)|^2; null: the paper's 1/(2 sigma^2); the authors' code has 50 (CelebA 70)", ge=0
    )
    inference_data_weight: float = setting(1.0, "of -log q(z~|x)", ge=0)
    inference_sample_weight: float = setting(1.0, "of -log q(z|x~); 1 in the paper, 0.1 in the authors' code", ge=0)


@dataclass(frozen=True)
class Adam:
    """Adam's settings for one network."""

    lr: float = setting(1e-4, "learning rate", gt=0)
    betas: tuple[float, float] = setting((0.0, 0.9), "averaging factors of the gradient and its square", ge=0, lt=1)
    eps: float = setting(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = setting(0.0, "L2 penalty added to the gradient", ge=0)
    lr_decay: float = setting(0.998, "factor of the learning rate per epoch", gt=0, le=1)


@dataclass(frozen=True)
class Optim:
    """One Adam a network, and how their learning rates begin and end."""

    energy: Adam = group(Adam, "Adam of E", lr=1e-4)
    generator: Adam = group(Adam, "Adam of G", lr=3e-4, weight_decay=5e-4)
    inference: Adam = group(Adam, "Adam of I", lr=1e-4, weight_decay=5e-4)
    warmup: int = setting(0, "images over which the three learning rates rise from 0 (the authors: none)", ge=0)
    cooldown: float = setting(
        0.0, "share of train.images over which they fall to 0 in the end, in a line (the authors: none)", ge=0, le=1
    )

    def rate(self, images: int, batch: int, total: int) -> float:
        """The factor of the learning rates for the batch after `images` of `total` images."""
        rising = (images + batch) / self.warmup if self.warmup else 1.0
        falling = (total - images) / (self.cooldown * total) if self.cooldown else 1.0
        return min(1.0, rising, falling)


@dataclass(frozen=True)
class Ema:
    """Moving average of the weights, used for sampling."""

    half_life: int = setting(100_000, "images after which old weights count half; 0: no average", ge=0)
    rampup: float = setting(0.05, "half-life at most this share of the images seen so far; 1: no ramp", gt=0, le=1)
    energy: bool = setting(False, "average E too, not G alone")


@dataclass(frozen=True)
class Sampling:
    """How a trained run draws samples; what is null is as in training (teaching.x_chain)."""

    steps: int | None = setting(None, "steps of the x-chain", ge=0)
    step_size: float | None = setting(None, "its step size", gt=0)
    temperature: float | None = setting(None, "its temperature", ge=0)
    batchnorm: Literal["running", "batch"] = setting(
        "running", "BatchNorm statistics: running, or each batch's own as the authors"
    )
    batch: int = setting(500, "images worked on at once", ge=1)


@dataclass(frozen=True)
class Train:
    """How long, and what is written when. Work is counted in images, so batch does not change it."""

    batch: int = setting(100, "images per iteration, of all processes together", ge=1, le=1_000_000)
    images: int = setting(15_000_000, "images to train on", ge=1)
    log_every: int = setting(50, "iterations between two lines of the log (the only host syncs)", ge=1, le=10_000)
    sample_every: int = setting(500_000, "images between two sample grids", ge=1)
    save_every: int = setting(500_000, "images between two saved states", ge=1)
    keep: int = setting(2, "saved states kept; with one, a damaged one has none before it", ge=1)
    grace: float = setting(30.0, "seconds from a SIGTERM in which the state must be saved", ge=0)
    deterministic: bool = setting(True, "on CUDA: the same seed gives the same run, at some cost in speed")


@dataclass(frozen=True)
class Engine:
    """How the work is done: its speed and memory. What is learned stays the same, but for rounding."""

    mode: Literal["auto", "eager", "compiled"] = setting(
        "auto", "eager: PyTorch as it is; compiled: fused kernels and, on CUDA, one graph; auto: compiled on CUDA"
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto", "of the convolutions; auto: bfloat16 where compiled on CUDA, else PyTorch's default (tf32 on CUDA)"
    )
    micro_batch: int | None = setting(
        None, "images a network sees at once, to save memory; BatchNorm then normalises over these; null: all", ge=1
    )
    threads: int | None = setting(
        None, "CPU threads; null: one a core it may use, 8 at most, or OMP_NUM_THREADS", ge=1, le=1024
    )
    sync_batchnorm: bool = setting(
        False, "several processes: BatchNorm over the images of all, in chains too; false: each over its own"
    )
    shared_noise: bool = setting(
        True, "several processes: each draws the noise of all, so that their number changes nothing; false: its own"
    )


@dataclass(frozen=True)
class Guard:
    """When a run counts as diverged, and what is done then."""

    energy_gap: float = setting(1000.0, "largest |E(x~) - E(x)|, batch means", gt=0)
    x_moved: float = setting(10.0, "largest way of the x-chain, rms per pixel (images are in [-1, 1])", gt=0)
    z_moved: float = setting(10.0, "largest way of the z-chain, rms per number (z ~ N(0, I))", gt=0)
    on_divergence: Literal["stop", "rollback"] = setting(
        "stop", "stop, or rollback: go on from the last good state with what 'lower' lowers"
    )
    rollbacks: int = setting(3, "how often in a run, before it is stopped after all", ge=1)
    lower: float = setting(0.5, "factor of the three learning rates and of both chains' step sizes", gt=0, lt=1)


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    preset: str = setting("", "the preset this came from")
    description: str = setting("", "what this experiment is")
    seed: int = setting(0, "fixes the initial weights, the data order and all noise", ge=0, lt=2**63)
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
        if self.teaching.energy_consistency > 0 and self.teaching.energy_shift >= self.data.size:
            raise UserError(
                f"teaching.energy_shift={self.teaching.energy_shift} moves images of data.size={self.data.size} out of "
                "sight: use less."
            )

    @property
    def sampling_chain(self) -> Chain:
        """The x-chain of a trained run: training's, with what `sampling` changes."""
        changes = {name: getattr(self.sampling, name) for name in ("steps", "step_size", "temperature")}
        return replace(self.teaching.x_chain, **{name: value for name, value in changes.items() if value is not None})
