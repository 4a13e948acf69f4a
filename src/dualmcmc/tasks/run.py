"""A trained run, ready to use from Python."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dualmcmc import rng as random_numbers
from dualmcmc import settings
from dualmcmc.config import Chain, Config
from dualmcmc.crew import ALONE, Crew
from dualmcmc.engine import checkpoint
from dualmcmc.engine.accelerate import choose, compile_for_use, evaluators
from dualmcmc.engine.device import make_repeatable, pick
from dualmcmc.engine.folder import RunFolder
from dualmcmc.engine.state import build_filled, load_live_trio, read_config
from dualmcmc.errors import UserError
from dualmcmc.files import digest
from dualmcmc.langevin import Trace, revise_x, revise_z
from dualmcmc.nets import Gaussian, Trio
from dualmcmc.nets.frozen import frozen, sampling_mode
from dualmcmc.progress import Watch, quiet
from dualmcmc.published import file_of, published

COMPILE_FROM = 5_000  # images to run chains on: fewer are done before a compiler is


class Run:
    """The three networks of a run and what can be done with them.

    Images are (B, C, H, W) floats in [-1, 1], latents (B, d), both on `run.device`. Every method that
    draws takes `rng`; without one it uses the run's own, seeded when the run was loaded. `steps` sets
    the length of a chain, None the run's own. A `trace` is filled with what the chain did.
    """

    def __init__(
        self,
        config: Config,
        trio: Trio,
        device: torch.device,
        images: int,
        seed: int = 0,
        file: Path | None = None,
        ema: bool = True,
        sha256: str | None = None,
        crew: Crew = ALONE,
    ) -> None:
        self.config, self.device, self.images, self.seed = config, device, images, seed
        self.crew = crew  # the processes that share the work of `draw`, and of tasks that say so
        self._refused = False  # by a compiler
        self.file, self.sha256, self.ema = file, sha256, ema  # of the weights: whence, which, whether averaged
        self.trio = trio.to(device).eval().requires_grad_(False)
        self.means = choose(replace(config.engine, mode="eager"), device)  # how chains are computed for now
        self._nets = self._evaluators()  # what chains are run with
        self.rng = random_numbers.generator(random_numbers.derive(seed, random_numbers.Stream.USE), device)

    def sample(self, n: int, steps: int | None = None, rng: torch.Generator | None = None) -> Tensor:
        """n samples of the EBM: x_hat = g(z), z ~ N(0, I), then the x-chain. steps=0: x_hat itself."""
        if n < 1:
            raise UserError(f"the number of samples must be at least 1, not {n}.")
        self.expect(n)
        parts = (self.generate(self.prior(size, rng)) for size in self._sizes(n))
        return torch.cat([self.revise_x(x_hat, steps, rng) for x_hat in parts])

    def draw(self, n: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """n samples in parts of at most `sampling.batch`, of which each process of the crew has its own.

        Of each part: how many samples come before it, generator samples x_hat, and the same after the x-chain. A part
        has random numbers of its own, so it does not matter who draws it; x_hat and the chain have too.
        """
        self.expect(n)
        first = 0
        for number, size in enumerate(self._sizes(n)):
            if number % self.crew.world == self.crew.rank:
                x_hat = self.generate(self.prior(size, self.stream("prior", first)))
                yield first, x_hat, self.revise_x(x_hat, rng=self.stream("x-chain", first))
            first += size

    def check_alike(self) -> None:
        """Whether all processes of the crew have the same weights: a run in training may have written others since."""
        seen = self.crew.gather(self.sha256)
        with self.crew.alike():
            if len(set(seen)) > 1:
                raise UserError(
                    "the processes have loaded different weights: is the run in training? Copy its snapshot."
                )

    def expect(self, n: int, watch: Watch = quiet, z_chain: bool = False) -> None:
        """Chains for n images are to come, on x or on z: for many of them, networks are compiled as `engine` says."""
        wanted = choose(self.config.engine, self.device)
        enough = n >= COMPILE_FROM or self.config.engine.mode == "compiled"
        if not wanted.compiled or not enough or self._refused:
            return
        if not self.means.compiled:
            self.means = wanted
            self._nets = self._evaluators()
        with sampling_mode(self.trio, self.config.sampling.batchnorm):
            refused = compile_for_use(self._nets, self.config, self._sizes(n), z_chain, self.device, watch)
        if refused:
            self._refused, self.means = True, replace(wanted, compiled=False)
            print(f"not compiled ({refused}): going on eagerly", file=sys.stderr)

    @property
    def engine(self) -> str:
        """How chains are computed, in words."""
        return self.means.in_words

    def _evaluators(self) -> Trio:
        with sampling_mode(self.trio, self.config.sampling.batchnorm):
            return evaluators(self.trio, self.config, self.means, self.config.engine.micro_batch)

    def _sizes(self, n: int) -> list[int]:
        """How n images are cut into even parts of at most `sampling.batch`."""
        parts = max(1, -(-n // self.config.sampling.batch))
        return [n // parts + (part < n % parts) for part in range(parts)]

    def stream(self, purpose: str, first: int = 0) -> torch.Generator:
        """A source for one purpose, fixed by the seed alone: what else was drawn before has no say in it.

        `first`: for the part of the work that begins with this item; the part at 0 has the purpose's own.
        """
        path = (random_numbers.Stream.USE, zlib.crc32(purpose.encode()), *([first] if first else []))
        return random_numbers.generator(random_numbers.derive(self.seed, *path), self.device)

    def check_traced(self, n: int) -> None:
        """Chains that are followed step by step run side by side, so they must fit into one batch."""
        if n > self.config.sampling.batch:
            raise UserError(f"-n {n}: at most {self.config.sampling.batch} chains are followed at once (--batch).")

    def prior(self, n: int, rng: torch.Generator | None = None) -> Tensor:
        """n latents z ~ N(0, I)."""
        return torch.randn(n, self.config.teaching.latent_dim, device=self.device, generator=rng or self.rng)

    def generate(self, z: Tensor) -> Tensor:
        """g(z): the generator's images of latents."""

        def forward(z: Tensor) -> Tensor:
            with frozen(self._nets.generator) as still:
                return still(z)

        return self._in_batches(forward, z)

    def revise_x(
        self,
        x: Tensor,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        trace: Trace | None = None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """T_x: Langevin steps on the energy from images x, with `config.sampling_chain`.

        `observed` (B, 1 or C, H, W), where given, is true for the pixels that stay as they are.
        """
        chain = _with_steps(self.config.sampling_chain, steps)
        source = rng or self.rng

        def chain_on(x: Tensor, *observed: Tensor) -> Tensor:
            return revise_x(self._nets.energy, x, chain, source, trace, *observed)

        return self._in_batches(chain_on, self._images(x), *_given(observed, x), trace=trace)

    def infer(self, x: Tensor) -> Gaussian:
        """q(z|x) of images x: its mean and log-variance."""
        both = self._in_batches(lambda part: torch.stack(tuple(self.trio.inference(part)), 1), self._images(x))
        return Gaussian(both[:, 0], both[:, 1])

    def revise_z(
        self,
        z: Tensor,
        x: Tensor,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        trace: Trace | None = None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """T_z: Langevin steps on p(z|x) from latents z of images x, with `teaching.z_chain`.

        `observed` (B, 1 or C, H, W), where given, is true for the pixels that count.
        """
        teaching = self.config.teaching
        chain = _with_steps(teaching.z_chain, steps)
        source = rng or self.rng

        def chain_on(z: Tensor, x: Tensor, *observed: Tensor) -> Tensor:
            return revise_z(self._nets.generator, z, x, teaching.sigma, chain, source, trace, *observed)

        return self._in_batches(chain_on, z, self._images(x), *_given(observed, x), trace=trace)

    def reconstruct(self, x: Tensor, steps: int | None = None, rng: torch.Generator | None = None) -> Tensor:
        """g at the latents of images x: q's mean, then the z-chain. steps=0: inference alone."""
        return self.generate(self.revise_z(self.infer(x).mean, x, steps, rng))

    def energy(self, x: Tensor) -> Tensor:
        """E(x) = -f(x), (B,): low where the model expects data."""
        return self._in_batches(self.trio.energy, self._images(x))

    def _images(self, x: Tensor) -> Tensor:
        """`x`, if it is of the shape this run was trained on."""
        shape = (self.config.data.channels, self.config.data.size, self.config.data.size)
        if x.ndim != 4 or x.shape[1:] != shape:
            raise UserError(
                f"this run was trained on images of {_in_words(shape)}, and these are of {_in_words(x.shape[1:])}."
            )
        return x

    def _in_batches(self, function: Callable[..., Tensor], *inputs: Tensor, trace: Trace | None = None) -> Tensor:
        """`function` on at most `sampling.batch` items at a time: memory stays bounded whatever the count.

        The parts are even, since with batch statistics a small last one would look different. A trace
        is of one chain, so it has them all at once.
        """
        count = 1 if trace is not None else max(1, -(-len(inputs[0]) // self.config.sampling.batch))
        # Chains differentiate, which a caller's inference mode would forbid: leave it, and its tensors.
        with torch.inference_mode(False), torch.no_grad(), sampling_mode(self.trio, self.config.sampling.batchnorm):
            own = (tensor.clone() if tensor.is_inference() else tensor for tensor in inputs)
            parts = zip(*(tensor.to(self.device).tensor_split(count) for tensor in own), strict=True)
            return torch.cat([function(*part) for part in parts])


def _given(observed: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
    """A mask for each image, where there are masks."""
    return () if observed is None else (observed.expand(len(x), -1, -1, -1),)


def _in_words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) + " (channels, height, width)"


def finite(x: Tensor) -> Tensor:
    """`x`, if a chain has not blown it up: as bytes that could not be told any more."""
    if not torch.isfinite(x).all():
        raise UserError(
            "the chain left the finite numbers: take a smaller --step-size or --temperature, or fewer steps."
        )
    return x


def _with_steps(chain: Chain, steps: int | None) -> Chain:
    if steps is None:
        return chain
    if steps < 0:
        raise UserError(f"the number of steps must be at least 0, not {steps}.")
    return replace(chain, steps=steps)


def load(
    path: str | Path,
    device: str | torch.device = "auto",
    ema: bool = True,
    seed: int = 0,
    overrides: Sequence[str] = (),
    crew: Crew = ALONE,
) -> Run:
    """A run from its folder, from a snapshot file alone, or from weights that come with the package, by their name.

    ema=False takes the weights as trained, not their average (needs the run folder's full state).
    `overrides` change how the run is used: "sampling.steps=70", "sampling.batch=100".
    """
    where, place = Path(path).expanduser(), crew.device(pick(str(device)))
    where = file_of(where) or where
    if not where.exists() and where.suffix != ".safetensors" and (known := published()):
        raise UserError(f"run '{where}' does not exist, and the weights that come along are: {', '.join(known)}.")
    if where.is_dir() or (not where.exists() and where.suffix != ".safetensors"):
        folder = RunFolder(where)
        folder.require_run()
        if not ema:
            state = folder.latest_state()
            config, trio = load_live_trio(state)
            return _run(config, trio, place, int(state.stem), seed, overrides, state, ema, crew)
        where = folder.snapshot
        if not where.exists():
            again = f"'dualmcmc train --resume --out {folder.root}'"
            raise UserError(f"'{folder.root}' holds no snapshot: {again} writes it.")
    elif not ema:
        raise UserError(f"'{where}' holds averaged weights only: name the run folder to use the others.")
    tensors, info = checkpoint.load(where)
    if "rng" in info:
        raise UserError(f"'{where}' is a full training state: name the run folder or its snapshot.")
    config = read_config(where)
    trio = build_filled(config, tensors, where)
    return _run(config, trio, place, info["images"], seed, overrides, where, ema, crew)


def _run(
    config: Config,
    trio: Trio,
    device: torch.device,
    images: int,
    seed: int,
    overrides: Sequence[str],
    file: Path,
    ema: bool,
    crew: Crew,
) -> Run:
    make_repeatable(device, config.train.deterministic)
    sha256 = digest(file, "sha256").hexdigest()  # now: a run in training writes another snapshot sooner or later
    return Run(_changed(config, overrides), trio, device, images, seed, file, ema, sha256, crew)


def _changed(config: Config, overrides: Sequence[str]) -> Config:
    for text in overrides:
        if not text.startswith(("sampling.", "engine.", "teaching.z_chain.", "data.path=", "data.test_path=")):
            raise UserError(
                f"'{text}' cannot be changed in a trained run: sampling.*, engine.* and teaching.z_chain.* can."
            )
    return settings.from_tree(settings.apply_overrides(settings.to_tree(config), overrides)) if overrides else config
