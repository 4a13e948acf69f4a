"""What the curves of a log say of the three networks and the two chains."""

from __future__ import annotations

import math
from itertools import pairwise
from operator import attrgetter
from statistics import median

from dualmcmc.config import Config
from dualmcmc.report.findings import Finding, calmer_energy, times
from dualmcmc.report.history import MIN_LINES, History
from dualmcmc.report.ranges import HEALTHY, healthy

GROWS, GROWN = 1.5, 1.0  # times a quarter of the log, and only above 1: healthy gaps drift upwards below 0.01
SPIKE = 30.0  # times the largest gap of its neighbours; healthy runs stay within 9
NOISE_ONLY = 1.05  # times what noise alone would move; chains that follow the energy have 1.2 and more
EXPLODED, EXPLODED_BAD = 30.0, 1000.0  # times the early gradient norm; healthy ones stay within 6
FALLEN, LEARNED = 0.9, 10  # of the error it began with, after so many lines; healthy runs are at half of it by then
RISEN, RISEN_BAD = 1.5, 3.0  # times the lowest error; healthy runs stay within 1.1
RISEN_NATS = 0.5  # a latent, over the lowest; healthy runs rise by 0.06 while G and I settle
QUIET_NOISE = 0.001  # a step of the x-chain, as the authors have it


def energy_gap(history: History, config: Config) -> list[Finding]:
    """How far E tells samples from data: too far, or further and further."""
    found = _in_range("energy_gap", history, config)
    gaps = [abs(value) for value in history.series("energy_gap")]
    if found.level == "ok" and len(gaps) >= MIN_LINES:
        length = len(gaps) // 4
        quarters = [median(gaps[len(gaps) - length * i :][:length]) for i in (4, 3, 2, 1)]
        grows = all(after > GROWS * before for before, after in pairwise(quarters))
        if grows and quarters[-1] > GROWN:
            path = ", ".join(f"{value:.3g}" for value in quarters)
            words = f"The energy gap grows steadily ({path} in the quarters of the log): samples fall behind E."
            found = Finding("watch", "energy_gap", words)
    return [found.advising(calmer_energy(config))]


def spikes(history: History, config: Config) -> list[Finding]:
    """Single batches whose energy gap stands out."""
    largest = history.recent("energy_gap_max")
    peak, usual = max(largest, default=0.0), median(largest or [0.0])
    if peak > SPIKE * usual and peak > HEALTHY["energy_gap"].high:
        mean = median(abs(value) for value in history.recent("energy_gap") or [0.0])
        words = (
            f"Single batches reach an energy gap of {peak:.3g}, where {usual:.3g} is usual and {mean:.3g} the mean: "
            "some chains run away."
        )
        return [Finding("watch", "energy_gap_max", words, times(config, "teaching.x_chain.step_size", 0.5))]
    return [Finding("ok", "energy_gap_max", "No batch stands out.")]


def flat_energy(history: History, config: Config) -> list[Finding]:
    """An energy that is the same everywhere teaches nothing."""
    gaps, norms = history.recent("energy_gap"), history.recent("grad_norm_energy")
    if gaps and not any(gaps):
        words = "The energy gap is exactly 0: E is the same everywhere and teaches nothing."
    elif norms and median(norms) < healthy(config)["grad_norm_energy"].low:
        words = f"The gradient of E has all but vanished (norm {median(norms):.3g}): E learns nothing."
    else:
        return [Finding("ok", "flat energy", "E tells images apart.")]
    return [Finding("bad", "flat energy", words, _anew(config, "energy"))]


def x_chain(history: History, config: Config) -> list[Finding]:
    """How far the x-chain goes, and whether E or noise leads it."""
    chain, found = config.teaching.x_chain, _in_range("x_moved", history, config)
    if chain.steps == 0 or not history.recent("x_moved"):
        return []
    moved, alone = median(history.recent("x_moved")), chain.noise_std * math.sqrt(chain.steps)
    if moved > HEALTHY["x_moved"].high and alone > HEALTHY["x_moved"].high:
        quiet = QUIET_NOISE**2 / (2 * chain.step_size)
        return [found.advising(f"teaching.x_chain.temperature={quiet:.3g} (its noise alone moves it by {alone:.3g})")]
    if found.level != "ok":
        factor = 0.5 if moved > HEALTHY["x_moved"].high else 4
        return [found.advising(times(config, "teaching.x_chain.step_size", factor))]
    # At temperature 1 noise leads by design; the cold chains of the image presets are there to follow E.
    if chain.temperature < 1 and moved < NOISE_ONLY * alone:
        words = (
            f"The x-chain moves by {moved:.3g} per pixel, no further than its noise alone would ({alone:.3g}): "
            "E does not steer samples. Early on this may pass."
        )
        bounded = config.teaching.energy_l2 > 0  # then a weaker bound makes E steeper; else E is pulled flat
        livelier = times(config, "teaching.energy_l2", 0.25) if bounded else "teaching.energy_l2=1"
        return [Finding("watch", "x_moved", words, f"if it lasts, {livelier} in a new run")]
    return [found]


def z_chain(history: History, config: Config) -> list[Finding]:
    """How far the z-chain goes."""
    moved = history.recent("z_moved")
    if config.teaching.z_chain.steps == 0 or not moved:
        return []
    factor = 0.25 if median(moved) > HEALTHY["z_moved"].high else 4
    return [_in_range("z_moved", history, config).advising(times(config, "teaching.z_chain.step_size", factor))]


def gradients(history: History, config: Config) -> list[Finding]:
    """Gradient norms of the three networks: out of range, or grown out of proportion."""
    findings = []
    for net in ("energy", "generator", "inference"):
        name = f"grad_norm_{net}"
        now, before, low = history.recent(name), history.early(name), healthy(config)[name].low
        if not now or (net == "energy" and median(now) < low):  # which `flat_energy` tells
            continue
        found = _in_range(name, history, config)
        growth = median(now) / max(median(before), low)
        if found.level == "ok" and growth > EXPLODED:
            words = f"The gradient of {net[0].upper()} is {growth:.0f} times what it was at the beginning."
            found = Finding("bad" if growth > EXPLODED_BAD else "watch", name, words)
        advice = times(config, f"optim.{net}.lr", 0.5)
        if median(now) < low:
            unheard = attrgetter(f"teaching.{net}_data_weight")(config) == 0
            advice = f"teaching.{net}_data_weight=1" if unheard else _anew(config, net)
        findings.append(found.advising(advice))
    return findings


def reconstruction(history: History, config: Config) -> list[Finding]:
    """The error of g(z~) against the data: it falls, and stays down."""
    name = "reconstruction_mse"
    values = history.series(name)
    if len(values) < MIN_LINES:
        return []
    now, lowest, first = median(history.recent(name)), history.lowest(name), median(values[:2])
    if now > FALLEN * first and len(values) >= LEARNED:
        words = f"The reconstruction error is {now:.3g} and began at {first:.3g}: G and I do not learn the images."
        lost = bool(moved := history.recent("z_moved")) and median(moved) > HEALTHY["z_moved"].high
        advice = times(config, "optim.generator.lr", 0.1 if now > first else 4)
        if lost and now <= first:  # latents that have nothing to do with their images
            advice = times(config, "teaching.z_chain.step_size", 0.25)
        return [Finding("bad" if now > RISEN * first else "watch", name, words, advice)]
    if now > RISEN * lowest:
        words = f"The reconstruction error rises again: {now:.3g}, after {lowest:.3g}."
        advice = times(config, "optim.generator.lr", 0.5)
        return [Finding("bad" if now > RISEN_BAD * lowest else "watch", name, words, advice)]
    return [Finding("ok", name, f"The reconstruction error fell from {first:.3g} to {now:.3g}.")]


def inference(history: History, config: Config) -> list[Finding]:
    """-log q of the revised latents: it may settle, not climb."""
    name = "inference_data_nll"
    if len(history.series(name)) < MIN_LINES:
        return []
    now, lowest = median(history.recent(name)), history.lowest(name)
    if now - lowest > RISEN_NATS * config.teaching.latent_dim:
        words = f"The inference loss rises: {now:.3g}, after {lowest:.3g}. I does not keep up with the z-chain."
        advice = f"{times(config, 'optim.inference.lr', 0.5)} {times(config, 'teaching.z_chain.step_size', 0.5)}"
        return [Finding("watch", name, words, advice)]
    return [Finding("ok", name, f"The inference loss is {now:.3g}.")]


def _anew(config: Config, net: str) -> str:
    """For a network that learns no more: steps that were too large have killed it."""
    return f"in a new run {times(config, f'optim.{net}.lr', 0.1)}"


def _in_range(name: str, history: History, config: Config) -> Finding:
    """A number's present size against the table; the advice is the caller's."""
    values = [abs(value) for value in history.recent(name)]
    span = healthy(config)[name]
    size = median(values) if values else span.high
    seen = f"The {span.words.replace('`', '')}, is {size:.3g}"
    if size > span.high:
        words = f"{seen}; healthy runs stay within {span.low:g} and {span.high:g}."
        return Finding("bad" if size > span.limit else "watch", name, words)
    if size < span.low:
        return Finding("watch", name, f"{seen}; below {span.low:g} it does next to nothing.")
    return Finding("ok", name, f"{seen}.")
