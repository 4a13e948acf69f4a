"""How long an iteration takes, part by part, beside a plain eager reference and what the chip can do.

The reference is benchmarks/reference.py. Before anything is timed, both run from the same weights with the same noise
and must agree.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dualmcmc.bench import timing
from dualmcmc.bench.check import (
    build_iteration,
    build_reference,
    check,
    random_images,
    refuse_what_the_reference_lacks,
)
from dualmcmc.config import Config
from dualmcmc.data.machine import in_words as memory_words
from dualmcmc.engine.accelerate import Means, set_precision
from dualmcmc.engine.device import make_repeatable
from dualmcmc.engine.graph import WARM_UP, Graphed
from dualmcmc.engine.iteration import Iteration
from dualmcmc.langevin import revise_x, revise_z
from dualmcmc.methods.dual_mcmc import descend, energy_loss, generator_loss, inference_loss
from dualmcmc.nets import Gaussian
from dualmcmc.nets.evaluator import uncompiled
from dualmcmc.nets.frozen import frozen
from dualmcmc.progress import Watch, quiet

Say = Callable[[str], None]
PARTS = {  # the two chains and the three updates
    "x-chain": "x-chain",
    "z-chain": "z-chain",
    "energy": "update of E",
    "generator": "update of G",
    "inference": "update of I",
}


def measure(
    config: Config,
    device: str = "auto",
    repeats: int = 10,
    with_reference: bool = True,
    say: Say = lambda text: None,
    watch: Watch = quiet,
) -> dict[str, Any]:
    """Check, then time: the reference, our engine as `config.engine` says, and the parts of both."""
    means = timing.begin(config, device, say)
    place = means.device
    result: dict[str, Any] = {
        **timing.described(config, place),
        "batch": config.train.batch,
        "steps": [config.teaching.x_chain.steps, config.teaching.z_chain.steps],
        "second_x_chain": config.teaching.second_x_chain,
        "deterministic": config.train.deterministic,
    }
    if with_reference:
        refuse_what_the_reference_lacks(config)
    ours = build_iteration(config, means)
    begun = time.perf_counter()
    ours.prepare(watch, say)
    timing.wait(place)
    compiling = time.perf_counter() - begun if ours.means.compiled else None
    if with_reference and config.engine.micro_batch and config.nets.kind == "resnet":
        say("not checked against the reference: in micro batches BatchNorm has other statistics")
    elif with_reference:
        say(f"checking against the reference in {means.precision}")
        result["check"] = {means.precision: check(ours, means.precision)}
        if means.precision != "float32":
            say("checking against the reference in float32")
            exact = build_iteration(config, replace(means, precision="float32"))
            exact.prepare(watch, say)
            result["check"]["float32"] = check(exact, "float32")
            del exact
    if with_reference:
        say("timing the reference")
        result["reference"] = _time_reference(config, place, max(2, repeats // 3))
    set_precision(ours.means)
    make_repeatable(place, config.train.deterministic)
    say("timing our engine")
    result["ours"] = _time_ours(ours, repeats) | {"seconds_to_compile": compiling}
    result["ceilings"] = timing.ceilings(place, ours.means.precision)
    if with_reference:
        result["ratio"] = result["reference"]["seconds"] / result["ours"]["seconds"]
    return result


def _time_reference(config: Config, device: torch.device, repeats: int) -> dict[str, Any]:
    """PyTorch with its defaults (on CUDA, float32 convolutions in tf32, any kernels): the whole, and each part."""
    set_precision(Means(False, "tf32", device))
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    before = _forget_peak(device)
    reference, rng = build_reference(config, device)
    x = random_images(config, device)
    whole = timing.seconds(lambda: reference.iteration(x, rng), device, repeats)
    peak, laps = _peak(device, before), timing.Laps(device)
    for _ in range(repeats):
        laps.begin()
        reference.iteration(x, rng, laps)
    flops = timing.flops_by_part(lambda lap: reference.iteration(x, rng, lap))
    parts = {name: {"seconds": laps.parts[name] / repeats, "flops": flops[name]} for name in PARTS}
    reference.cfg = without_chains(config).teaching
    rest = timing.seconds(lambda: reference.iteration(x, rng), device, repeats)
    precision = "tf32" if device.type == "cuda" else "float32"
    return _summary(config, whole, rest, parts, peak) | {"mode": "eager", "precision": precision}


def _time_ours(iteration: Iteration, repeats: int) -> dict[str, Any]:
    config, device = iteration.config, iteration.state.device
    _forget_peak(device)
    whole = timing.seconds(iteration, device, repeats, WARM_UP + 2)
    peak, parts = _peak(device), {}
    for name, work in _parts(iteration).items():
        with uncompiled(iteration.networks):
            flops = timing.count_flops(work)
        graphed = iteration.means.graphed
        run = Graphed(work, device, iteration.state.rng) if graphed else work
        parts[name] = {"seconds": timing.seconds(run, device, repeats, WARM_UP + 2), "flops": flops}
    iteration.go_on_with(without_chains(config))
    rest = timing.seconds(iteration, device, repeats, WARM_UP + 2)
    return _summary(config, whole, rest, parts, peak) | {
        "mode": "compiled" if iteration.means.compiled else "eager",
        "precision": iteration.means.precision,
    }


def without_chains(config: Config) -> Config:
    """The same with chains of no steps: what of an iteration is not chain."""
    teaching = config.teaching
    x_chain, z_chain = replace(teaching.x_chain, steps=0), replace(teaching.z_chain, steps=0)
    return replace(config, teaching=replace(teaching, x_chain=x_chain, z_chain=z_chain))


def _summary(
    config: Config, whole: float, rest: float, parts: dict[str, dict[str, float]], peak: int | None
) -> dict[str, Any]:
    return {
        "seconds": whole,
        "images_per_second": config.train.batch / whole,
        "flops": sum(part["flops"] for part in parts.values()),
        "peak_bytes": peak,
        "seconds_without_chains": rest,
        "share_not_chain": rest / whole,
        "parts": parts,
    }


def _parts(iteration: Iteration) -> dict[str, Callable[[], object]]:
    """Each part of an iteration on its own, of the same pieces as the whole."""
    config, state, nets = iteration.config, iteration.state, iteration.networks
    cfg, optimizers, rng = config.teaching, state.optimizers, state.rng
    x = random_images(config, state.device)
    z, z_rev = (torch.randn(len(x), cfg.latent_dim, device=state.device) for _ in range(2))
    x_rev = torch.rand_like(x) * 2 - 1

    def generator() -> None:
        x_hat = nets.generator(z)
        descend(optimizers.generator, generator_loss(x, nets.generator(z_rev), x_rev, x_hat, cfg)[0])
        if cfg.second_x_chain:
            with torch.no_grad(), frozen(nets.generator) as still:
                still(z)

    def inference() -> None:
        q, q_rev = Gaussian(*nets.inference(x)), Gaussian(*nets.inference(x_rev))
        descend(optimizers.inference, inference_loss(q, z_rev, q_rev, z, cfg)[0])

    def x_chains() -> None:
        for _ in range(1 + cfg.second_x_chain):
            revise_x(nets.energy, x_rev, cfg.x_chain, rng)

    return {
        "x-chain": x_chains,
        "z-chain": lambda: revise_z(nets.generator, z, x, cfg.sigma, cfg.z_chain, rng),
        "energy": lambda: descend(optimizers.energy, energy_loss(nets, x, x_rev, rng, cfg)[0]),
        "generator": generator,
        "inference": inference,
    }


def _forget_peak(device: torch.device) -> int:
    """Start anew; the bytes that are taken already."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int = 0) -> int | None:
    """The most that was taken, of which `before` belongs to others."""
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def in_words(result: dict[str, Any]) -> str:
    """The result as a table."""
    ours, reference, top = result["ours"], result.get("reference"), result["ceilings"]["matmul_flops"]
    k_x, k_z = result["steps"]
    unit, letter = (1e12, "T") if ours["flops"] > 1e11 else (1e9, "G")
    lines = [
        f"{result['preset']}: batch {result['batch']}, k_x {k_x}{' twice' if result['second_x_chain'] else ''}, "
        f"k_z {k_z}; {timing.where(result)}",
        f"ours: {ours['mode']}, {ours['precision']}; matrix products reach {top / unit:.3g} {letter}FLOP/s in that, "
        f"copies {result['ceilings']['copy_bytes'] / 1e9:,.0f} GB/s",
    ]
    for precision, found in result.get("check", {}).items():
        within = f"within {found['largest']:.1g} (bound {found['bound']:g})"
        lines.append(f"same losses as the reference in {precision}: {within}")
    titles = f"{'reference':>12}{'ours':>12}{'ratio':>8}{letter + 'FLOP':>9}{letter + 'FLOP/s':>9}{'share':>7}"
    lines.append(f"{'':18}{titles}{'as plain' if reference else '':>10}".rstrip())
    rows = {"whole iteration": (ours, reference)} | {
        words: (ours["parts"][name], reference and reference["parts"][name]) for name, words in PARTS.items()
    }
    for words, (mine, theirs) in rows.items():
        rate = mine["flops"] / mine["seconds"]
        row = f"{words:18}{_ms(theirs):>12}{_ms(mine):>12}"
        row += f"{theirs['seconds'] / mine['seconds']:>7.1f}x" if theirs else f"{'':>8}"
        row += f" {mine['flops'] / unit:>8.3g}{rate / unit:>9.3g}{rate / top:>7.0%}"
        lines.append(row + (f"{theirs['flops'] / mine['seconds'] / top:>10.0%}" if theirs else ""))
    plain = "; as plain: counting the reference's operations" if reference else ""
    lines.append(f"share: of the matrix product's rate{plain}")
    for words, side in (("reference", reference), ("ours", ours)):
        if side:
            memory = f", peak memory {memory_words(side['peak_bytes'])}" if side["peak_bytes"] else ""
            other = f"not in a chain {side['share_not_chain']:.0%}"
            lines.append(f"{words}: {side['images_per_second']:,.0f} images/s, {other}{memory}")
    if ours["seconds_to_compile"] is not None:
        lines.append(f"compiling took {ours['seconds_to_compile']:.0f} s; it is cached for the next run")
    return "\n".join(lines)


def _ms(part: dict[str, Any] | None) -> str:
    return f"{1000 * part['seconds']:,.2f} ms" if part else ""
