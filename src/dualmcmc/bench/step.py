"""The time of an iteration, part by part, compared with a plain eager reference and the device's peak rates.

Before anything is timed, engine and reference run from the same weights with the same noise and must agree.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dualmcmc.bench import timing
from dualmcmc.bench.reference import Reference
from dualmcmc.config import Chain, Config
from dualmcmc.data.loader import BatchLoader
from dualmcmc.data.store import MemoryStore
from dualmcmc.engine.cuda import WARMUP_RUNS, CudaGraph
from dualmcmc.engine.executor import uncompiled
from dualmcmc.engine.plan import ExecutionPlan, set_precision
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.step import TrainStep
from dualmcmc.langevin import revise_x, revise_z, squared_error
from dualmcmc.methods import Losses, terms, update
from dualmcmc.nets import Gaussian
from dualmcmc.nets.frozen import frozen
from dualmcmc.utils.device import exact_float32, format_bytes, set_deterministic
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress

PARTS = {  # the two chains and the three updates
    "x-chain": "x-chain",
    "z-chain": "z-chain",
    "energy": "update of E",
    "generator": "update of G",
    "inference": "update of I",
}
WARMUP = WARMUP_RUNS + 2  # enough for a CUDA graph to be captured and replayed once
FLOAT32_TOLERANCE = 1e-4  # largest relative difference of any statistic
REDUCED_TOLERANCE = 0.05  # the same in tf32 and bfloat16
GRADIENT_SLACK = 4  # gradient norms may differ by this factor more
CHECK_STEP_SCALE = 0.01  # the check scales the chains' step sizes by this
Numbers = dict[str, float]


def measure(
    config: Config,
    device: str = "auto",
    repeats: int = 10,
    with_reference: bool = True,
    notify: Callable[[str], None] = lambda text: None,
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """Check the engine against the reference, then time both, whole and by part; with the ramp's final settings."""
    if config.method != "dual-mcmc" or config.teaching.z_start == "prior":
        raise UserError("only method=dual-mcmc with teaching.z_start=inference can be benchmarked.")
    config = replace(config, teaching=replace(config.teaching, energy_augment_ramp=0))
    plan = timing.set_up(config, device, notify)
    if with_reference:
        _check_supported(config)
    step = build_step(config, plan)
    start = time.perf_counter()
    step.prepare(progress, notify)
    timing.synchronize(plan.device)
    compile_seconds = time.perf_counter() - start if step.plan.compiled else None
    result: dict[str, Any] = {
        **timing.describe(config, plan.device),
        "batch": config.train.batch,
        "x_chain_steps": config.teaching.x_chain.steps,
        "z_chain_steps": config.teaching.z_chain.steps,
        "second_x_chain": config.teaching.second_x_chain,
        "deterministic": config.train.deterministic,
    }
    if with_reference:
        if config.engine.micro_batch and config.nets.kind == "resnet":
            notify("not checked against the reference: BatchNorm's statistics depend on the micro-batch")
        else:
            result["check"] = _check_precisions(step, plan, progress, notify)
        notify("timing the reference")
        result["reference"] = _time_reference(config, plan.device, max(2, repeats // 3))
    set_precision(step.plan)
    set_deterministic(plan.device, config.train.deterministic)
    notify("timing the engine")
    result["engine"] = _time_engine(step, repeats) | {"compile_seconds": compile_seconds}
    result["peak"] = timing.measure_peak_rates(plan.device, step.plan.precision)
    if with_reference:
        result["speedup"] = result["reference"]["seconds"] / result["engine"]["seconds"]
    return result


def _check_supported(config: Config) -> None:
    for name, chain in (("x_chain", config.teaching.x_chain), ("z_chain", config.teaching.z_chain)):
        for option, used, off in (
            ("grad_clip", chain.grad_clip is not None, "null"),
            ("metropolis", chain.metropolis, "false"),
        ):
            if used:
                raise UserError(
                    f"the reference does not support teaching.{name}.{option}: set it to {off}, or add --no-reference."
                )


def _time_reference(config: Config, device: torch.device, repeats: int) -> dict[str, Any]:
    """With PyTorch's defaults: on CUDA float32 convolutions in tf32, and any kernels."""
    set_precision(ExecutionPlan(False, "tf32", device))
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    allocated = _reset_peak_memory(device)
    reference, rng = build_reference(config, device)
    x = random_images(config, device)
    seconds = timing.median_seconds(lambda: reference.iteration(x, rng), device, repeats)
    peak_memory = _peak_memory(device, allocated)
    timer = timing.LapTimer(device)
    for _ in range(repeats):
        timer.start()
        reference.iteration(x, rng, timer)
    flops = timing.count_flops_by_part(lambda lap: reference.iteration(x, rng, lap))
    parts = {name: {"seconds": timer.seconds[name] / repeats, "flops": flops[name]} for name in PARTS}
    reference.cfg = without_chains(config).teaching
    rest = timing.median_seconds(lambda: reference.iteration(x, rng), device, repeats)
    precision = "tf32" if device.type == "cuda" else "float32"
    return {"mode": "eager", "precision": precision} | _summary(config, seconds, rest, parts, peak_memory)


def _time_engine(step: TrainStep, repeats: int) -> dict[str, Any]:
    config, device = step.config, step.state.device
    _reset_peak_memory(device)
    seconds = timing.median_seconds(step, device, repeats, WARMUP)
    peak_memory = _peak_memory(device)
    parts = {}
    for name, part in _engine_parts(step).items():
        with uncompiled(step.executors):
            flops = timing.count_flops(part)
        run = CudaGraph(part, device, step.state.rng) if step.plan.uses_cuda_graph else part
        parts[name] = {"seconds": timing.median_seconds(run, device, repeats, WARMUP), "flops": flops}
    step.reconfigure(without_chains(config))
    rest = timing.median_seconds(step, device, repeats, WARMUP)
    mode = "compiled" if step.plan.compiled else "eager"
    return {"mode": mode, "precision": step.plan.precision} | _summary(config, seconds, rest, parts, peak_memory)


def without_chains(config: Config) -> Config:
    """The same config with chains of zero steps."""
    teaching = config.teaching
    x_chain, z_chain = replace(teaching.x_chain, steps=0), replace(teaching.z_chain, steps=0)
    return replace(config, teaching=replace(teaching, x_chain=x_chain, z_chain=z_chain))


def _summary(
    config: Config,
    seconds: float,
    seconds_without_chains: float,
    parts: dict[str, dict[str, float]],
    peak_memory: int | None,
) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "images_per_second": config.train.batch / seconds,
        "flops": sum(part["flops"] for part in parts.values()),
        "peak_memory_bytes": peak_memory,
        "seconds_without_chains": seconds_without_chains,
        "fraction_outside_chains": seconds_without_chains / seconds,
        "parts": parts,
    }


def _engine_parts(step: TrainStep) -> dict[str, Callable[[], object]]:
    """Each part of an iteration as a function that can be timed alone."""
    config, state, nets = step.config, step.state, step.executors
    cfg, optimizers, rng = config.teaching, state.optimizers, state.rng
    x = random_images(config, state.device)
    z, z_rev = (torch.randn(len(x), cfg.latent_dim, device=state.device) for _ in range(2))
    x_rev = torch.rand_like(x) * 2 - 1

    def x_chain() -> None:
        for _ in range(1 + cfg.second_x_chain):
            revise_x(terms.augmented(nets.energy, x_rev, cfg, rng), x_rev, cfg.x_chain, rng)

    def z_chain() -> None:
        revise_z(nets.generator, z, x, cfg.sigma, cfg.z_chain, rng)

    def energy() -> None:
        e = terms.paired_energies(nets.energy, x, x_rev, cfg, rng)
        update(optimizers, Losses(energy=terms.regularize(e.data.mean() - e.sample.mean(), e, cfg)))

    def generator() -> None:
        w_data, w_sample = terms.generator_weights(cfg)
        x_hat = nets.generator(z)
        data_error, sample_error = squared_error(x, nets.generator(z_rev)).mean(), squared_error(x_rev, x_hat).mean()
        update(optimizers, Losses(generator=w_data * data_error + w_sample * sample_error))
        if cfg.second_x_chain:
            with torch.no_grad(), frozen(nets.generator) as net:
                net(z)

    def inference() -> None:
        q, q_rev = Gaussian(*nets.inference(x)), Gaussian(*nets.inference(x_rev))
        loss = cfg.inference_data_weight * q.nll(z_rev).mean() + cfg.inference_sample_weight * q_rev.nll(z).mean()
        update(optimizers, Losses(inference=loss))

    return {
        "x-chain": x_chain,
        "z-chain": z_chain,
        "energy": energy,
        "generator": generator,
        "inference": inference,
    }


def _reset_peak_memory(device: torch.device) -> int:
    """Returns the bytes that are still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_memory(device: torch.device, allocated: int = 0) -> int | None:
    """Peak bytes on a GPU, without those allocated before."""
    return torch.cuda.max_memory_allocated(device) - allocated if device.type == "cuda" else None


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    engine, reference, peak = result["engine"], result.get("reference"), result["peak"]
    peak_flops = peak["matmul_flops_per_second"]
    unit, prefix = (1e12, "T") if engine["flops"] > 1e11 else (1e9, "G")
    twice = " twice" if result["second_x_chain"] else ""
    lines = [
        f"{result['preset']}: batch {result['batch']}, k_x {result['x_chain_steps']}{twice}, "
        f"k_z {result['z_chain_steps']}; {timing.format_environment(result)}",
        f"engine: {engine['mode']}, {engine['precision']}; peak rates: matrix product {peak_flops / unit:.3g} "
        f"{prefix}FLOP/s, copy {peak['copy_bytes_per_second'] / 1e9:,.0f} GB/s",
    ]
    for precision, check in result.get("check", {}).items():
        lines.append(
            f"agrees with the reference in {precision}: largest relative difference "
            f"{check['max_difference']:.1g} (tolerance {check['tolerance']:g})"
        )
    columns = f"{'reference':>12}{'engine':>12}{'speedup':>9}{prefix + 'FLOP':>8}{prefix + 'FLOP/s':>9}{'peak':>6}"
    lines.append(f"{'':18}{columns}" + (f"{'effective':>11}" if reference else ""))
    rows = {"iteration": (engine, reference)} | {
        label: (engine["parts"][name], reference and reference["parts"][name]) for name, label in PARTS.items()
    }
    for label, (ours, theirs) in rows.items():
        rate = ours["flops"] / ours["seconds"]
        line = f"{label:18}{_format_ms(theirs):>12}{_format_ms(ours):>12}"
        line += f"{theirs['seconds'] / ours['seconds']:>8.1f}x" if theirs else f"{'':>9}"
        line += f"{ours['flops'] / unit:>8.3g}{rate / unit:>9.3g}{rate / peak_flops:>6.0%}"
        lines.append(line + (f"{theirs['flops'] / ours['seconds'] / peak_flops:>11.0%}" if theirs else ""))
    effective = "; effective: the same, with the reference's FLOP count" if reference else ""
    lines.append(f"peak: FLOP/s as a fraction of the matrix product's{effective}")
    for name, side in (("reference", reference), ("engine", engine)):
        if side:
            memory = f", peak memory {format_bytes(side['peak_memory_bytes'])}" if side["peak_memory_bytes"] else ""
            outside = f"{side['fraction_outside_chains']:.0%} of the time outside the chains"
            lines.append(f"{name}: {side['images_per_second']:,.0f} images/s, {outside}{memory}")
    if engine["compile_seconds"] is not None:
        lines.append(f"compiled in {engine['compile_seconds']:.0f} s; cached for the next run")
    return "\n".join(lines)


def _format_ms(part: dict[str, Any] | None) -> str:
    return f"{1000 * part['seconds']:,.2f} ms" if part else ""


def _check_precisions(
    step: TrainStep, plan: ExecutionPlan, progress: ProgressFactory, notify: Callable[[str], None]
) -> dict[str, Any]:
    """Check in the plan's precision and in float32."""
    notify(f"checking against the reference in {plan.precision}")
    checks = {plan.precision: check(step, plan.precision)}
    if plan.precision != "float32":
        notify("checking against the reference in float32")
        exact = build_step(step.config, replace(plan, precision="float32"))
        exact.prepare(progress, notify)
        checks["float32"] = check(exact, "float32")
    return checks


def check(step: TrainStep, precision: str) -> dict[str, Any]:
    """Check that the engine computes what the reference does, from the same weights with the same noise.

    `step` must be new, prepared and of this precision. With learning rates of almost zero every iteration starts from
    the same weights: with a CUDA graph, some before its capture and some after.
    """
    config, device = step.config, step.state.device
    step.reconfigure(_check_config(config))
    ours = _engine_stats(step)
    step.reconfigure(config)
    theirs = _reference_stats(config, device, len(ours))
    rows = [_relative_differences(a, b) for a, b in zip(ours, theirs, strict=True)]
    differences = {name: max(row[name] for row in rows) for name in rows[0]}
    worst = max(differences, key=lambda name: differences[name])
    tolerance = FLOAT32_TOLERANCE if precision == "float32" else REDUCED_TOLERANCE
    if differences[worst] > tolerance:
        raise UserError(
            f"the engine ({step.plan.summary}) and the reference disagree: {worst} differs by "
            f"{differences[worst]:.2g}, more than {tolerance:g}. Nothing was timed; add --no-reference to time the "
            "engine alone."
        )
    return {"tolerance": tolerance, "max_difference": differences[worst], "differences": differences}


def _relative_differences(ours: Numbers, theirs: Numbers) -> Numbers:
    """Relative to each value; energies, which have an arbitrary zero, relative to the larger mean energy."""
    energy_scale = max(abs(theirs["energy_data"]), abs(theirs["energy_sample"]))
    differences = {}
    for name, value in theirs.items():
        scale = energy_scale if name.startswith("energy") else abs(value)
        slack = GRADIENT_SLACK if name.startswith("grad_norm") else 1
        difference = abs(ours[name] - value) / (scale + 1e-12) / slack
        differences[name] = difference if math.isfinite(difference) else math.inf  # NaN compares false
    return differences


def _check_config(config: Config) -> Config:
    """The same config without learning, and with small chain steps.

    With full steps, each step of an untrained network's chain amplifies rounding errors about tenfold.
    """
    optim, teaching = config.optim, config.teaching
    frozen_optim = {name: replace(getattr(optim, name), lr=1e-30) for name in ("energy", "generator", "inference")}

    def with_small_steps(chain: Chain) -> Chain:
        return replace(chain, step_size=chain.step_size * CHECK_STEP_SCALE)

    x_chain, z_chain = with_small_steps(teaching.x_chain), with_small_steps(teaching.z_chain)
    teaching = replace(teaching, x_chain=x_chain, z_chain=z_chain)
    return replace(config, optim=replace(optim, **frozen_optim), teaching=teaching)


def _engine_stats(step: TrainStep) -> list[Numbers]:
    rows = []
    for _ in range(WARMUP if step.plan.uses_cuda_graph else 2):
        step()
        stats = step.window.read(1)
        stats.pop("energy_gap_max")
        rows.append(stats)
    return rows


def _reference_stats(config: Config, device: torch.device, count: int) -> list[Numbers]:
    reference, rng = build_reference(_check_config(config), device)
    x = random_images(config, device)
    with exact_float32():
        return [{name: value.item() for name, value in reference.iteration(x, rng).items()} for _ in range(count)]


def build_reference(config: Config, device: torch.device) -> tuple[Reference, torch.Generator]:
    """The reference with the initial weights and the noise stream of the engine."""
    state, reference = build_state(config, device), Reference(config, device)
    reference.nets.load_state_dict(state.trio.state_dict())
    return reference, state.rng


def build_step(config: Config, plan: ExecutionPlan) -> TrainStep:
    """The engine on one fixed batch of random images."""
    images = MemoryStore(_random_pixels(config))
    loader = _FixedBatch(images, config.seed, config.train.batch, plan.device, "device")
    return TrainStep(config, build_state(config, plan.device), loader, plan)


def build_state(config: Config, device: torch.device) -> TrainState:
    """A new state, with E's gains for the random images."""
    state = TrainState(config, device)
    state.normalize_energy(MemoryStore(_random_pixels(config)))
    return state


def random_images(config: Config, device: torch.device) -> Tensor:
    """The same batch, for the reference."""
    return from_uint8(_random_pixels(config)).to(device)


def _random_pixels(config: Config) -> Tensor:
    shape = (config.train.batch, config.data.channels, config.data.size, config.data.size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class _FixedBatch(BatchLoader):
    """Always the first batch, not shuffled."""

    def select(self, start: int) -> tuple[Tensor, ...]:
        return (torch.arange(self.local_batch, device=self._order.device),)
