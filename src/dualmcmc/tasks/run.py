"""A trained run: its networks and its settings, ready to use from Python."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualmcmc import rng as random_numbers
from dualmcmc.config import Chain, Config, Data, Engine
from dualmcmc.data import DataSplits
from dualmcmc.data import load as load_data
from dualmcmc.engine.compilation import compile_for_sampling
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.plan import ExecutionPlan, build_executors, fit_plan, resolve_plan
from dualmcmc.engine.state import prior_tensors
from dualmcmc.langevin import Trace, revise_x, revise_z
from dualmcmc.nets import Gaussian, Prior, Trio, parameter_counts
from dualmcmc.nets.frozen import Watched, eval_mode, frozen
from dualmcmc.pretrained import has_name
from dualmcmc.tasks import results
from dualmcmc.tasks.convert import as_images, as_latents
from dualmcmc.tasks.export import export, push
from dualmcmc.utils.errors import NotFinite, UserError, sanitize
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.images import Picture, grid, side_by_side, to_uint8
from dualmcmc.utils.progress import ProgressFactory, format_count, no_progress

COMPILE_MIN_IMAGES = 5_000  # chains on fewer images finish before compilation would


class Run:
    """The networks of a run and their use.

    Results are (B, C, H, W) floats in [-1, 1] for images and (B, d) for latents, on `run.device`. Images may be given
    as tensors, arrays or PIL images, latents as tensors or arrays (`tasks.convert`). A run on other samples than images
    takes and returns tensors of their shape, and refuses what is for images alone. Methods that draw random numbers
    take `rng`; None means the run's own generator, seeded when the run is loaded. `steps` is the length of a chain,
    `temperature` the temperature of a z-chain; None means the run's setting. A `trace` receives the diagnostics of a
    chain.
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
        world: World = SINGLE_PROCESS,
        trained_data: Data | None = None,
        splits: DataSplits | None = None,
        source: str | None = None,
        results_folder: Path | None = None,
        prior: Prior | None = None,
    ) -> None:
        self.config, self.device, self.seed = config, device, seed
        self.images = images  # trained on
        self.trained_data = trained_data or config.data  # of the run's own images; `config.data` may be overridden
        self._splits = splits  # data given in Python
        self.file, self.sha256, self.ema = file, sha256, ema  # of the weights
        self.source = source or (None if file is None else str(file))  # a path, or hf://USER/NAME@COMMIT
        self.results_folder = results_folder  # where the command records what it measures
        self._prior = None if prior is None else Prior(*(part.to(device) for part in prior))  # None: N(0, I)
        self.world = world  # processes that share the work of `sample_batches` and of some tasks
        self.trio = trio.to(device).eval().requires_grad_(False)
        self.plan = self._resolve_plan(replace(config.engine, mode="eager"))  # until `prepare` compiles
        self._compiled_plan: ExecutionPlan | None = None  # resolved once
        self._compile_failed = False
        self._on_step: Callable[[int], None] = _ignore
        self._executors = self._build_executors()
        self.rng = random_numbers.make_generator(random_numbers.derive_seed(seed, random_numbers.Stream.USE), device)

    def __repr__(self) -> str:
        count, what = sum(parameter_counts(self.trio).values()), self.config.data.noun
        shape = "x".join(map(str, self.config.data.sample_shape))
        name = "custom networks" if self.config.nets.kind == "custom" else sanitize(self.config.preset or "unnamed")
        return (
            f"Run({name}: {shape} {what}, {format_count(count)} parameters, trained on {self.images:,} {what}, on "
            f"{self.device})"
        )

    def load_data(self, progress: ProgressFactory = no_progress) -> DataSplits:
        """The run's own data: those passed to `load`, or those that its settings name."""
        return self._splits if self._splits is not None else load_data(self.trained_data, progress)

    def require_images(self, what: str) -> None:
        """Raise `UserError` unless the run was trained on images."""
        if not self.config.data.is_image:
            shape = self.config.data.sample_shape
            raise UserError(f"{what} is for images, and this run was trained on samples of shape {shape}.")

    def has(self, network: str) -> bool:
        """Whether the run's method trains this network: energy, generator or inference."""
        return getattr(self.trio, network) is not None

    def require(self, network: str, what: str) -> None:
        """Raise `UserError` unless the run's method trains this network."""
        if not self.has(network):
            name = {"energy": "an energy", "generator": "a generator", "inference": "an inference model"}[network]
            raise UserError(f"{what} needs {name}, which method={self.config.method} does not train.")

    def sample(self, n: int, steps: int | None = None, rng: torch.Generator | None = None) -> Tensor:
        """n samples of the EBM: x_hat = g(z), z ~ N(0, I), then the x-chain. With steps=0: x_hat.

        Without a generator the x-chain starts from uniform noise; without an energy there is none.
        """
        if n < 1:
            raise UserError(f"the number of samples must be at least 1, not {n}.")
        self.prepare(n)
        starts = (self.initial_images(size, rng) for size in self._batch_sizes(n))
        return torch.cat([self.revise_x(x, steps, rng) if self.has("energy") else x for x in starts])

    def initial_images(self, n: int, rng: torch.Generator | None = None) -> Tensor:
        """n initial states of the x-chain: generator samples, or uniform noise without a generator."""
        if self.has("generator"):
            return self.generate(self.prior(n, rng))
        like = torch.empty(n, *self.config.data.sample_shape, device=self.device)
        return random_numbers.uniform_like(like, rng or self.rng)

    def initial_latents(self, x: Any, rng: torch.Generator | None = None) -> Tensor:
        """Initial states of the z-chain of images x: the mean of q(z|x), or prior draws without an inference model."""
        x = self._images(x)
        return self.infer(x).mean if self.has("inference") else self.prior(len(x), rng)

    def sample_batches(self, n: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """n samples in batches of at most `sampling.batch`: index of the first, generator samples, EBM samples.

        Without a generator the former are uniform noise; without an energy the latter are the former.

        Each process yields its own batches. Every batch has its own random numbers, so the number of processes does not
        change the samples; generator samples and chain noise are independent of each other too.
        """
        self.prepare(n)
        first = 0
        for number, size in enumerate(self._batch_sizes(n)):
            if number % self.world.size == self.world.rank:
                start = self.initial_images(size, self.generator_for("prior", first))
                revised = (
                    self.revise_x(start, rng=self.generator_for("x-chain", first)) if self.has("energy") else start
                )
                yield first, start, revised
            first += size

    def _watch(self, state: Tensor) -> None:
        self._on_step(len(state))

    @contextmanager
    def watch_steps(self, on_step: Callable[[int], None]) -> Iterator[None]:
        """During the block, every evaluation of a network in a chain calls `on_step` with the number of its images.

        There is one per step, and one more per chain with an accept/reject step.
        """
        before, self._on_step = self._on_step, on_step
        try:
            yield
        finally:
            self._on_step = before

    def check_same_weights(self) -> None:
        """Raise `UserError` if the processes loaded different weights, as they may from a run in training."""
        checksums = self.world.all_gather(self.sha256)
        with self.world.fail_together():
            if len(set(checksums)) > 1:
                raise UserError(
                    "the processes loaded different weights: if the run is in training, use a copy of its snapshot."
                )

    def prepare(self, n: int, progress: ProgressFactory = no_progress, z_chain: bool = False) -> None:
        """Compile the x-chain (or z-chain) for n images, if `engine` requests it and n is large enough."""
        worthwhile = n >= COMPILE_MIN_IMAGES or self.config.engine.mode == "compiled"
        if not worthwhile or self._compile_failed:
            return
        plan = self._compiled_plan = self._compiled_plan or self._resolve_plan(self.config.engine)
        if not plan.compiled:
            return
        if not self.plan.compiled:
            self.plan = plan
            self._executors = self._build_executors()
        sizes = self._batch_sizes(n)
        with eval_mode(self.trio, self.config.sampling.batchnorm):
            failure = compile_for_sampling(self._executors, self.config, sizes, z_chain, self.device, progress)
        if failure:
            self._compile_failed, self.plan = True, replace(plan, compiled=False)
            print(f"running eagerly: compilation failed ({failure})", file=sys.stderr)

    @property
    def engine(self) -> str:
        """How chains run: eager or compiled, and the precision."""
        return self.plan.summary

    def _resolve_plan(self, engine: Engine) -> ExecutionPlan:
        plan = resolve_plan(engine, self.device)
        if self.config.nets.kind != "custom":
            return plan
        with eval_mode(self.trio, self.config.sampling.batchnorm):
            return fit_plan(plan, self.trio, self.config)

    def _build_executors(self) -> Trio:
        with eval_mode(self.trio, self.config.sampling.batchnorm):
            return build_executors(self.trio, self.config, self.plan)

    def _batch_sizes(self, n: int) -> list[int]:
        """n images in batches of equal size, up to one image, and at most `sampling.batch`."""
        count = max(1, -(-n // self.config.sampling.batch))
        return [n // count + (number < n % count) for number in range(count)]

    def generator_for(self, purpose: str, first: int = 0) -> torch.Generator:
        """A random generator for one purpose, determined by the seed alone, not by earlier draws.

        `first` is the index of the first item of a batch; each batch has its own generator.
        """
        path = (random_numbers.Stream.USE, zlib.crc32(purpose.encode()), *([first] if first else []))
        return random_numbers.make_generator(random_numbers.derive_seed(self.seed, *path), self.device)

    def check_one_batch(self, n: int) -> None:
        """Raise `UserError` if n traced chains do not fit into one batch: a trace covers one call of the kernel."""
        if n > self.config.sampling.batch:
            raise UserError(f"-n {n}: at most sampling.batch={self.config.sampling.batch} chains can be traced.")

    def prior(self, n: int, rng: torch.Generator | None = None) -> Tensor:
        """n latents z ~ N(0, I), or of the prior that the method has fitted."""
        z = torch.randn(n, self.config.teaching.latent_dim, device=self.device, generator=rng or self.rng)
        return z if self._prior is None else self._prior.transform(z)

    def generate(self, z: Any) -> Tensor:
        """g(z): the generator's images."""
        self.require("generator", "this")

        def forward(z: Tensor) -> Tensor:
            with frozen(self._executors.generator) as generator:
                return generator(z)

        return self._in_batches(forward, self._latents(z))

    def revise_x(
        self,
        x: Any,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        trace: Trace | None = None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """T_x: Langevin steps on the energy from images x, with `config.sampling_chain`.

        `observed`, a boolean mask that broadcasts to x, such as (B, 1, H, W), marks values that do not change.
        """
        self.require("energy", "the x-chain")
        chain = _with_steps(self.config.sampling_chain, steps)
        return self._run_x_chain(self._images(x), chain, rng or self.rng, trace, observed)

    def x_chain(
        self, x: Any, steps: int | None = None, rng: torch.Generator | None = None, observed: Tensor | None = None
    ) -> Iterator[Tensor]:
        """The states of the x-chain from images x, one after the other; `revise_x` returns the last.

        (Up to the order of random numbers, if there are more than `sampling.batch` images.)
        """
        self.require("energy", "the x-chain")
        chain, source = _with_steps(self.config.sampling_chain, steps), rng or self.rng

        def step(state: Tensor) -> Tensor:
            return self._run_x_chain(state, replace(chain, steps=1), source, None, observed)

        return _iterate(step, self._images(x).to(self.device), chain.steps)

    def _run_x_chain(
        self, x: Tensor, chain: Chain, rng: torch.Generator, trace: Trace | None, observed: Tensor | None
    ) -> Tensor:
        energy = Watched(self._executors.energy, self._watch)

        def run_chain(x: Tensor, *observed: Tensor) -> Tensor:
            return revise_x(energy, x, chain, rng, trace, *observed)

        return self._in_batches(run_chain, x, *_expand_mask(observed, x), trace=trace)

    def infer(self, x: Any) -> Gaussian:
        """q(z|x) of images x: its mean and log-variance."""
        self.require("inference", "this")
        both = self._in_batches(lambda batch: torch.stack(tuple(self.trio.inference(batch)), 1), self._images(x))
        return Gaussian(both[:, 0], both[:, 1])

    def revise_z(
        self,
        z: Any,
        x: Any,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        trace: Trace | None = None,
        observed: Tensor | None = None,
        temperature: float | None = None,
    ) -> Tensor:
        """T_z: Langevin steps on p(z|x) from latents z of images x, with `z_chain`.

        With `observed`, a boolean mask of known values that broadcasts to x, such as (B, 1, H, W): on p(z | these).
        """
        self.require("generator", "the z-chain")
        chain = self.z_chain_settings(steps, temperature)
        return self._run_z_chain(z, self._images(x), chain, rng or self.rng, trace, observed)

    def z_chain(
        self,
        z: Any,
        x: Any,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        observed: Tensor | None = None,
        temperature: float | None = None,
    ) -> Iterator[Tensor]:
        """The states of the z-chain from latents z of images x, one after the other; `revise_z` returns the last."""
        self.require("generator", "the z-chain")
        chain, source = self.z_chain_settings(steps, temperature), rng or self.rng
        images = self._images(x)

        def step(state: Tensor) -> Tensor:
            return self._run_z_chain(state, images, replace(chain, steps=1), source, None, observed)

        return _iterate(step, self._latents(z, len(images)).to(self.device), chain.steps)

    def z_chain_settings(self, steps: int | None = None, temperature: float | None = None) -> Chain:
        """`teaching.z_chain` with another number of steps or temperature, if given."""
        chain = _with_steps(self.config.teaching.z_chain, steps)
        return chain if temperature is None else replace(chain, temperature=temperature)

    def _run_z_chain(
        self, z: Any, x: Tensor, chain: Chain, rng: torch.Generator, trace: Trace | None, observed: Tensor | None
    ) -> Tensor:
        sigma, generator = self.config.teaching.sigma, Watched(self._executors.generator, self._watch)

        def run_chain(z: Tensor, x: Tensor, *observed: Tensor) -> Tensor:
            return revise_z(generator, z, x, sigma, chain, rng, trace, *observed)

        return self._in_batches(run_chain, self._latents(z, len(x)), x, *_expand_mask(observed, x), trace=trace)

    def reconstruct(
        self,
        x: Any,
        steps: int | None = None,
        rng: torch.Generator | None = None,
        temperature: float | None = 0.0,
    ) -> Tensor:
        """g at the latents of images x: the mean of q(z|x), then the z-chain. With steps=0: inference alone.

        Without an inference model the z-chain starts from prior draws.

        The z-chain is noise-free unless a temperature is given: it approaches a mode of p(z|x), which is closer to x
        than a sample.
        """
        x = self._images(x)
        z = self.initial_latents(x, rng)
        return self.generate(self.revise_z(z, x, steps, rng, temperature=temperature))

    def energy(self, x: Any) -> Tensor:
        """E(x) = -f(x), (B,): low for likely images. Differentiable in x if x requires a gradient."""
        self.require("energy", "this")
        x = self._images(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._in_batches(lambda part: self.trio.energy(part).flatten(), x)
        with eval_mode(self.trio, self.config.sampling.batchnorm):
            parts = x.split(self.config.sampling.batch)
            return torch.cat([self.trio.energy(part.to(self.device)).flatten() for part in parts])

    def picture(self, *images: Any, captions: Sequence[str] = (), columns: int | None = None) -> Picture:
        """Grids of images next to each other, each below its caption; Jupyter shows it, `save` writes a PNG."""
        self.require_images("a picture")
        grids = [grid(to_uint8(self._images(x)).cpu(), columns or max(1, round(len(x) ** 0.5))) for x in images]
        if not grids or (captions and len(captions) != len(grids)):
            raise UserError(f"{len(captions)} captions for {len(grids)} sets of images: give one for each.")
        return Picture(side_by_side(*grids, captions=captions))

    def export(self, path: str | Path, dtype: str = "float16") -> dict[str, Any]:
        """Write the weights as `dtype`, and the settings without paths; returns size and relative rounding error."""
        return export(self._weights(), self._shared_config(), self.images, expand_user(path), dtype)

    def _weights(self) -> dict[str, Tensor]:
        """What a snapshot contains."""
        return self.trio.state_dict() | prior_tensors(self._prior)

    def push(
        self,
        repo: str,
        dtype: str = "float16",
        private: bool = False,
        branch: str | None = None,
        message: str | None = None,
        license: str | None = None,
        replace_card: bool = False,
    ) -> dict[str, Any]:
        """Commit the weights as `export` writes them to a repository on the Hugging Face Hub, USER/NAME.

        Creates the repository (private if `private`) and the branch if necessary, and writes a model card unless there
        is one. Returns what `export` does, and where to find the weights.
        """
        weights = self._weights(), self._shared_config(), self.images, parameter_counts(self.trio)
        return push(*weights, self._own_results(), repo, dtype, private, branch, message, license, replace_card)

    def _shared_config(self) -> Config:
        """The settings that exported weights include: of the run's own data, without paths or names of files."""
        config = replace(self.config, data=replace(self.trained_data, path=None, test_path=None))
        if (path := self.trained_data.path) is not None:
            config = replace(config, description=config.description.removesuffix(f": {Path(path).name}"))
        if config.train.init is not None and not has_name(config.train.init):
            config = replace(config, train=replace(config.train, init="another run"))
        return config

    def _own_results(self) -> list[dict[str, Any]]:
        """The recorded results of exactly these weights; the run may have been trained further since others."""
        found = [] if self.results_folder is None else results.read_all(self.results_folder)
        return [
            result for result in found if isinstance(run := result.get("run"), dict) and run["sha256"] == self.sha256
        ]

    def _images(self, x: Any) -> Tensor:
        return as_images(x, self.config.data)

    def _latents(self, z: Any, count: int | None = None) -> Tensor:
        return as_latents(z, self.config.teaching.latent_dim, count)

    def _in_batches(self, function: Callable[..., Tensor], *inputs: Tensor, trace: Trace | None = None) -> Tensor:
        """`function` on at most `sampling.batch` items at a time, so that memory stays bounded.

        Batches are of equal size: with batch statistics, a small last one would give different images. A trace covers
        a single call, so a traced chain runs in one batch.
        """
        count = 1 if trace is not None else max(1, -(-len(inputs[0]) // self.config.sampling.batch))
        # Chains need gradients, which a caller's inference mode would forbid: leave it, and copy its tensors.
        with torch.inference_mode(False), torch.no_grad(), eval_mode(self.trio, self.config.sampling.batchnorm):
            own = (tensor.clone() if tensor.is_inference() else tensor for tensor in inputs)
            batches = zip(*(tensor.to(self.device).tensor_split(count) for tensor in own), strict=True)
            return torch.cat([function(*batch) for batch in batches])


def _iterate(step: Callable[[Tensor], Tensor], state: Tensor, steps: int) -> Iterator[Tensor]:
    """The state, and the states after each step."""
    yield state
    for _ in range(steps):
        state = step(state)
        yield state


def _ignore(images: int) -> None:
    pass


def _expand_mask(observed: Tensor | None, x: Tensor) -> tuple[Tensor, ...]:
    """One mask per sample, as an optional argument."""
    if observed is None:
        return ()
    fits = observed.ndim == x.ndim and all(a in (1, b) for a, b in zip(observed.shape, x.shape, strict=True))
    if not fits or observed.dtype != torch.bool:
        kind = f"{str(observed.dtype).removeprefix('torch.')} of shape {tuple(observed.shape)}"
        raise UserError(f"observed must be a boolean mask that broadcasts to {tuple(x.shape)}, not {kind}.")
    return (observed.expand(len(x), *observed.shape[1:]),)


def require_finite(x: Tensor) -> Tensor:
    """`x`, if a chain has not diverged; conversion to uint8 would hide that."""
    if not torch.isfinite(x).all():
        raise NotFinite(
            "the chain diverged to non-finite values: reduce sampling.step_size, sampling.temperature or "
            "sampling.steps."
        )
    return x


def _with_steps(chain: Chain, steps: int | None) -> Chain:
    if steps is None:
        return chain
    if steps < 0:
        raise UserError(f"the number of steps must be at least 0, not {steps}.")
    return replace(chain, steps=steps)
