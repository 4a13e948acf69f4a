"""Checks of the logged statistics: the energy, the two chains, gradients, reconstruction, inference.

Healthy values in the comments are those of the runs in docs/guide/health.md.
"""

from __future__ import annotations

import math
from itertools import pairwise
from operator import attrgetter
from statistics import median

from dualmcmc.config import Config
from dualmcmc.health.findings import HEALTHY_RANGES, Finding, healthy_ranges, scaled_setting, slower_energy
from dualmcmc.health.history import MIN_LINES, History

GAP_GROWTH = 1.5  # factor between successive quarters of the log
MIN_GROWN_GAP = 1.0  # growth below it is no problem: healthy gaps drift upwards below 0.01
SPIKE_RATIO = 30.0  # the largest gap of a batch over the median; healthy: up to 9
NOISE_ONLY_RATIO = 1.05  # displacement over that of noise alone; chains that follow the energy: 1.2 and more
GRAD_GROWTH_WARNING, GRAD_GROWTH_ERROR = 30.0, 1000.0  # factor over the early gradient norm; healthy: up to 6
MSE_DROP, MSE_DROP_LINES = 0.9, 10  # fraction of the initial error to be below after so many lines; healthy: 0.5
MSE_RISE_WARNING, MSE_RISE_ERROR = 1.5, 3.0  # factor over the lowest error; healthy: up to 1.1
NLL_RISE = 0.5  # nats per latent dimension above the lowest; healthy: up to 0.06, while G and I settle
AUTHORS_NOISE = 0.001  # of the x-chain, per step


def energy_gap(history: History, config: Config) -> list[Finding]:
    """The energy gap between samples and data is neither too large nor growing."""
    if "energy" not in config.networks:
        return []
    finding = _check_range("energy_gap", history, config)
    gaps = [abs(value) for value in history.series("energy_gap")]
    if finding.level == "ok" and len(gaps) >= MIN_LINES:
        length = len(gaps) // 4
        quarters = [median(gaps[len(gaps) - length * i :][:length]) for i in (4, 3, 2, 1)]
        grows = all(after > GAP_GROWTH * before for before, after in pairwise(quarters))
        if grows and quarters[-1] > MIN_GROWN_GAP:
            medians = ", ".join(f"{value:.3g}" for value in quarters)
            message = f"The energy gap keeps growing ({medians} over the log): samples do not keep up with E."
            finding = Finding("warning", "energy_gap", message)
    return [finding.with_advice(slower_energy(config, _has_x_chain(history)))]


def _has_x_chain(history: History) -> bool:
    """Whether the method revises samples; some let G descend E instead."""
    return bool(history.series("x_displacement_rms"))


def spikes(history: History, config: Config) -> list[Finding]:
    """No single batch has an extreme energy gap."""
    if "energy" not in config.networks:
        return []
    largest = history.recent("energy_gap_max")
    peak, typical = max(largest, default=0.0), median(largest or [0.0])
    if peak > SPIKE_RATIO * typical and peak > HEALTHY_RANGES["energy_gap"].high:
        mean = median(abs(value) for value in history.recent("energy_gap") or [0.0])
        message = (
            f"The largest energy gap of a batch is {peak:.3g}, although {typical:.3g} is typical and the mean gap is "
            f"{mean:.3g}: some {'x-chains' if _has_x_chain(history) else 'samples'} diverge."
        )
        key = "teaching.x_chain.step_size" if _has_x_chain(history) else "optim.energy.lr"
        return [Finding("warning", "energy_gap_max", message, scaled_setting(config, key, 0.5))]
    return [Finding("ok", "energy_gap_max", "No batch has an extreme energy gap.")]


def flat_energy(history: History, config: Config) -> list[Finding]:
    """E is not constant, and still learns."""
    if "energy" not in config.networks:
        return []
    gaps, norms = history.recent("energy_gap"), history.recent("grad_norm_energy")
    if gaps and not any(gaps):
        message = "The energy gap is exactly 0: E is constant and teaches nothing."
    elif norms and median(norms) < healthy_ranges(config)["grad_norm_energy"].low:
        message = f"The gradient of E has vanished (norm {median(norms):.3g}): E has stopped learning."
    else:
        return [Finding("ok", "flat_energy", "E is not constant.")]
    return [Finding("error", "flat_energy", message, _new_run_advice(config, "energy"))]


def energy_slope(history: History, config: Config) -> list[Finding]:
    """E is steep enough to steer samples, and not too steep."""
    slopes, healthy = history.recent("energy_slope"), HEALTHY_RANGES["energy_slope"]
    if config.teaching.x_chain.steps == 0 or not slopes:  # runs before 0.1.0 did not log it
        return []
    if median(slopes) < healthy.low:
        message = (
            f"The slope of E is {median(slopes):.3g}: E is flat and does not steer the samples. Early in training this "
            "may pass."
        )
        return [Finding("warning", "energy_slope", message, _steeper_energy(config))]
    return [_check_range("energy_slope", history, config).with_advice(slower_energy(config))]


def x_chain(history: History, config: Config) -> list[Finding]:
    """The x-chain moves neither too far nor too little, and follows E rather than its noise."""
    name, chain = "x_displacement_rms", config.teaching.x_chain
    if chain.steps == 0 or not history.recent(name):
        return []
    if "generator" not in config.networks:  # from noise, which it should replace
        return []
    finding, high = _check_range(name, history, config), healthy_ranges(config)[name].high
    displacement, noise = median(history.recent(name)), chain.noise_std * math.sqrt(chain.steps)
    if displacement > high and noise > high:
        temperature = AUTHORS_NOISE**2 / (2 * chain.step_size)
        advice = f"teaching.x_chain.temperature={temperature:.3g} (the displacement by noise alone is {noise:.3g})"
        return [finding.with_advice(advice)]
    if finding.level != "ok":
        factor = 0.5 if displacement > high else 4
        return [finding.with_advice(scaled_setting(config, "teaching.x_chain.step_size", factor))]
    # At temperature 1 noise dominates by design; the cold chains of the image presets should follow E.
    if chain.temperature < 1 and displacement < NOISE_ONLY_RATIO * noise:
        message = (
            f"The x-chain displacement is {displacement:.3g}, no more than that of its noise alone ({noise:.3g}): E "
            "does not steer the samples. Early in training this may pass."
        )
        return [Finding("warning", name, message, _steeper_energy(config))]
    return [finding]


def z_chain(history: History, config: Config) -> list[Finding]:
    """The z-chain moves neither too far nor too little."""
    name = "z_displacement_rms"
    displacement = history.recent(name)
    if config.teaching.z_chain.steps == 0 or not displacement:
        return []
    high = HEALTHY_RANGES[name].high
    if median(displacement) > high and (config.method == "sr-abp" or config.teaching.z_start == "prior"):
        return []  # from prior draws, which it should replace
    factor = 0.25 if median(displacement) > high else 4
    advice = scaled_setting(config, "teaching.z_chain.step_size", factor)
    return [_check_range(name, history, config).with_advice(advice)]


def gradients(history: History, config: Config) -> list[Finding]:
    """Gradient norms are in range and have not exploded."""
    findings = []
    for net in ("energy", "generator", "inference"):
        name = f"grad_norm_{net}"
        recent, early, low = history.recent(name), history.early(name), healthy_ranges(config)[name].low
        if not recent or (net == "energy" and median(recent) < low):  # the latter is reported by `flat_energy`
            continue
        finding = _check_range(name, history, config)
        growth = median(recent) / max(median(early), low)
        if finding.level == "ok" and growth > GRAD_GROWTH_WARNING:
            message = f"The gradient norm of {net[0].upper()} is {growth:.0f} times its initial value."
            finding = Finding("error" if growth > GRAD_GROWTH_ERROR else "warning", name, message)
        advice = scaled_setting(config, f"optim.{net}.lr", 0.5)
        if median(recent) < low:
            no_loss = attrgetter(f"teaching.{net}_data_weight")(config) == 0
            advice = f"teaching.{net}_data_weight=1" if no_loss else _new_run_advice(config, net)
        findings.append(finding.with_advice(advice))
    return findings


def reconstruction(history: History, config: Config) -> list[Finding]:
    """The error of g(z~) falls and does not rise again."""
    name = "reconstruction_mse"
    values = history.series(name)
    if len(values) < MIN_LINES:
        return []
    now, lowest, first = median(history.recent(name)), history.lowest(name), median(values[:2])
    if now > MSE_DROP * first and len(values) >= MSE_DROP_LINES:
        learners = "G and I do" if "inference" in config.networks else "G does"
        message = f"The reconstruction error is {now:.3g}, initially {first:.3g}: {learners} not learn the images."
        displacement = history.recent("z_displacement_rms")
        advice = scaled_setting(config, "optim.generator.lr", 0.1 if now > first else 4)
        too_far = bool(displacement) and median(displacement) > HEALTHY_RANGES["z_displacement_rms"].high
        if too_far and now <= first:  # the latents have lost their images
            advice = scaled_setting(config, "teaching.z_chain.step_size", 0.25)
        return [Finding("error" if now > MSE_RISE_WARNING * first else "warning", name, message, advice)]
    if now > MSE_RISE_WARNING * lowest:
        message = f"The reconstruction error has risen from {lowest:.3g} to {now:.3g}."
        advice = scaled_setting(config, "optim.generator.lr", 0.5)
        return [Finding("error" if now > MSE_RISE_ERROR * lowest else "warning", name, message, advice)]
    return [Finding("ok", name, f"The reconstruction error fell from {first:.3g} to {now:.3g}.")]


def inference(history: History, config: Config) -> list[Finding]:
    """-log q of the revised latents does not rise."""
    name = "inference_data_nll"
    if len(history.series(name)) < MIN_LINES:
        return []
    now, lowest = median(history.recent(name)), history.lowest(name)
    if now - lowest > NLL_RISE * config.teaching.latent_dim:
        message = f"The inference loss has risen from {lowest:.3g} to {now:.3g}: I does not keep up with the z-chain."
        keys = ("optim.inference.lr", "teaching.z_chain.step_size")
        return [Finding("warning", name, message, " ".join(scaled_setting(config, key, 0.5) for key in keys))]
    return [Finding("ok", name, f"The inference loss is {now:.3g}.")]


def _steeper_energy(config: Config) -> str:
    """For an E that is too flat to steer samples."""
    changes = []
    if config.nets.energy_slope is None:
        changes.append("nets.energy_slope=1")
    if config.teaching.energy_l2 == 0:
        changes.append("teaching.energy_l2=1")
    if not changes:
        # A chain acts on E as a gradient penalty: a weaker one allows a steeper E. More weight keeps its effect on G.
        changes.append(scaled_setting(config, "teaching.x_chain.step_size", 0.25))
        if config.teaching.generator_sample_weight:
            changes.append(scaled_setting(config, "teaching.generator_sample_weight", 4))
    return f"if it persists, {' '.join(changes)} in a new run"


def _new_run_advice(config: Config, net: str) -> str:
    """For a network that no longer learns: its learning rate was too large."""
    return f"start a new run with {scaled_setting(config, f'optim.{net}.lr', 0.1)}"


def _check_range(name: str, history: History, config: Config) -> Finding:
    """The recent median of a statistic against its healthy range; without advice."""
    values = [abs(value) for value in history.recent(name)]
    healthy = healthy_ranges(config)[name]
    size = median(values) if values else healthy.high
    text = f"The {healthy.description} is {size:.3g}"
    if size > healthy.high:
        message = f"{text}; healthy runs stay between {healthy.low:g} and {healthy.high:g}."
        return Finding("error" if size > healthy.limit else "warning", name, message)
    if size < healthy.low:
        return Finding("warning", name, f"{text}; below {healthy.low:g} it has almost no effect.")
    return Finding("ok", name, f"{text}.")
