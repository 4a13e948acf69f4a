"""Checks of the run itself: divergence, rollbacks, non-finite statistics, speed, saves, resumes."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from dualmcmc.config import Config
from dualmcmc.health.findings import HEALTHY_RANGES, Finding, scaled_setting, slower_energy
from dualmcmc.health.history import Entry, History, parse_number
from dualmcmc.utils.errors import sanitize

SLOWDOWN = 3.0  # factor; a busy machine alone makes the speed of a healthy run vary by 2
MIN_SPEED_LINES = 12  # of one session: its first lines include warm-up
MAX_SAVE_FRACTION, MIN_SAVE_SECONDS = 0.1, 60.0  # of the time spent saving; less than a minute does not matter
MIN_RESUMES, MIN_LINES_PER_SESSION = 5, 10  # so many resumes, with fewer lines per session, cost too much work
BACKED_OFF = (  # the settings that a rollback reduces
    "optim.energy.lr",
    "optim.generator.lr",
    "optim.inference.lr",
    "teaching.x_chain.step_size",
    "teaching.z_chain.step_size",
)
MAX_REASON_LENGTH = 200  # characters of a logged reason


def divergence(history: History, config: Config) -> list[Finding]:
    """Findings if the run diverged or was rolled back; none otherwise."""
    findings = []
    if event := _final_divergence(history):
        message = f"The run diverged at image {event['images']:,}: {_reason(event)}."
        findings.append(Finding("error", "diverged", message, _divergence_advice(history, config)))
    if rollbacks := history.events("rollback"):
        last = rollbacks[-1]
        count = last["number"] if isinstance(last.get("number"), int) else len(rollbacks)
        times = "once" if count == 1 else f"{count:,} times"
        message = f"The run diverged and was rolled back {times}, last to image {last['images']:,}: {_reason(last)}."
        reduced = last.get("reduced")
        settings = _reduced_settings(reduced) if isinstance(reduced, dict) else []
        advice = f"start the next run with {' '.join(settings)}" if settings else _divergence_advice(history, config)
        findings.append(Finding("warning", "rollback", message, advice))
    return findings


def finite(history: History, config: Config) -> list[Finding]:
    """All statistics are finite; no finding if the run ended by divergence, which is reported already."""
    if _final_divergence(history):
        return []
    first_seen: dict[str, int] = {}
    for line in history.lines:
        for name, value in line.items():
            number = parse_number(value)
            if number is not None and not math.isfinite(number):
                first_seen.setdefault(name, line["images"])
    if not first_seen:
        return [Finding("ok", "finite", "All statistics are finite.")]
    names = ", ".join(f"{sanitize(name)} at image {images:,}" for name, images in list(first_seen.items())[:3])
    more = f" and {len(first_seen) - 3} more" if len(first_seen) > 3 else ""
    message = f"Not finite: {names}{more}. The weights cannot be trusted from there on."
    return [Finding("error", "finite", message, _divergence_advice(history, config))]


def speed(history: History, config: Config) -> list[Finding]:
    """The last session has not slowed down."""
    starts = [i for i, entry in enumerate(history.log) if entry.get("kind") in ("start", "resume")]
    session, name = History(history.log[starts[-1] :] if starts else history.log), "iterations_per_second"
    if len(session.series(name)) < MIN_SPEED_LINES:
        return []
    before, now = median(session.early(name)), median(session.recent(name))
    if now * SLOWDOWN < before:
        message = f"Training has slowed down from {before:.3g} to {now:.3g} iterations per second."
        return [Finding("warning", "speed", message, "check the machine for other processes and for throttling")]
    return [Finding("ok", "speed", f"{now:.3g} iterations per second.")]


def saves(history: History, config: Config) -> list[Finding]:
    """Saving takes a small fraction of the time."""
    seconds = [parse_number(event.get("seconds")) for event in history.events("save")]
    spent = sum(value for value in seconds if value is not None and math.isfinite(value))
    fraction = spent / max(spent + max(history.series("seconds"), default=0.0), 1e-9)
    if spent > MIN_SAVE_SECONDS and fraction > MAX_SAVE_FRACTION:
        message = f"Saving takes {fraction:.0%} of the time."
        return [Finding("warning", "saves", message, scaled_setting(config, "train.save_every", 4))]
    return [Finding("ok", "saves", "Saving takes little time.")]


def resumes(history: History, config: Config) -> list[Finding]:
    """The run is not interrupted too often."""
    count, lines = len(history.events("resume")), len(history.lines)
    if count >= MIN_RESUMES and lines < MIN_LINES_PER_SESSION * (count + 1):
        message = f"The run was resumed {count} times within {lines} log lines: each stop loses work."
        return [Finding("warning", "resumes", message, scaled_setting(config, "train.save_every", 0.5))]
    return [Finding("ok", "resumes", f"Resumed {count} times.")]


def _final_divergence(history: History) -> Entry | None:
    """The divergence that ended the run, if no training followed it."""
    final: Entry | None = None
    for entry in history.log:
        if entry.get("kind") == "diverged":
            final = entry
        elif entry.get("kind") in ("resume", "rollback", "train"):
            final = None
    return final


def _divergence_advice(history: History, config: Config) -> str:
    """Reduce the step size of the chain that diverged; if unclear which, all rates that may be the cause.

    Of the two chains only those that the method logs.
    """
    last: Entry = next((entry for entry in reversed(history.log) if entry.get("kind") == "train"), {})
    step_sizes = {f"{chain}_displacement_rms": f"teaching.{chain}_chain.step_size" for chain in ("x", "z")}
    displacements = {name: parse_number(last.get(name)) for name in step_sizes}
    diverged = [
        name
        for name, value in displacements.items()
        if value is not None and not abs(value) <= HEALTHY_RANGES[name].limit
    ]
    if len(diverged) == 1:
        return scaled_setting(config, step_sizes[diverged[0]], 0.1)
    chains = [key for name, key in step_sizes.items() if name in last or not last]
    if "energy" not in config.networks:
        return " ".join(scaled_setting(config, key, 0.5) for key in ("optim.generator.lr", *chains))
    z = [scaled_setting(config, key, 0.5) for key in chains if key == step_sizes["z_displacement_rms"]]
    return " ".join([*z, slower_energy(config, step_sizes["x_displacement_rms"] in chains)])


def _reason(event: Entry) -> str:
    """The first sentence of the logged reason; general advice follows it there."""
    return sanitize(str(event.get("reason", "no reason given")), MAX_REASON_LENGTH).partition(". ")[0].rstrip(".")


def _reduced_settings(logged: dict[str, Any]) -> list[str]:
    """Logged settings as KEY=VALUE to paste: known names with positive numbers only, since a log is not trusted."""
    numbers = {key: parse_number(logged[key]) for key in BACKED_OFF if key in logged}
    return [f"{key}={value:.4g}" for key, value in numbers.items() if value is not None and 0 < value < math.inf]
