"""Findings and the verdict on them, healthy ranges, and advice in the form of settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from dualmcmc.config import Config

Level = Literal["ok", "warning", "error"]
VERDICTS: dict[Level, str] = {"error": "unhealthy", "warning": "warning", "ok": "healthy"}  # the worst first


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    check: str  # the logged statistic, or the name of the check
    message: str
    advice: str = ""  # settings to change; empty if the level is ok

    def with_advice(self, advice: str) -> Finding:
        """The same finding with advice, unless its level is ok."""
        return self if self.level == "ok" else replace(self, advice=advice)


def verdict(findings: Sequence[Finding]) -> str:
    """healthy, warning or unhealthy: the worst finding decides."""
    levels = {finding.level for finding in findings}
    return next((text for level, text in VERDICTS.items() if level in levels), VERDICTS["ok"])


def format_findings(findings: Sequence[Finding]) -> list[str]:
    """One line per error, then per warning, each followed by its advice; last, the checks that are ok."""
    lines = []
    for level in ("error", "warning"):
        for finding in findings:
            if finding.level == level:
                lines += [f"{level:<7} {finding.check}: {finding.message}", f"advice  {finding.advice}"]
    passed = {finding.check: finding.message for finding in findings if finding.level == "ok"}
    if note := passed.pop("log", ""):
        lines.append(f"note    {note}")
    return [*lines, f"ok      {', '.join(passed)}"] if passed else lines


def scaled_setting(config: Config, key: str, factor: float) -> str:
    """KEY=VALUE with the run's value times `factor`; an integer stays one."""
    value = attrgetter(key)(config)
    return f"{key}={max(1, round(value * factor))}" if isinstance(value, int) else f"{key}={value * factor:.4g}"


def slower_energy(config: Config, x_chain: bool = True) -> str:
    """Advice if E learns faster than the samples follow, with or without an x-chain."""
    keys = ("optim.energy.lr", *(["teaching.x_chain.step_size"] if x_chain else []))
    advice = " ".join(scaled_setting(config, key, 0.5) for key in keys)
    return advice if config.nets.spectral_norm else f"{advice}; in a new run nets.spectral_norm=true"


@dataclass(frozen=True)
class Range:
    """Healthy from `low` to `high`, an error above `limit`, a warning otherwise."""

    description: str
    low: float
    high: float
    limit: float
    reason: str


MIN_GRAD_NORM = 1e-5  # spread over a million parameters, a smaller gradient is lost in Adam's eps of 1e-8

HEALTHY_RANGES = {
    "energy_gap": Range(
        "energy gap E(x~) - E(x)",
        -5,
        5,
        50,
        "healthy runs settle below 1; CIFAR-10 varies by 3 in its first thousand iterations",
    ),
    "energy_slope": Range(
        "slope of E along the x-chain",
        0.01,
        100,
        1e4,
        "0.1 to 0.3 on CIFAR-10 once E teaches G; an E whose slope fades with depth starts at 0.0005 to 0.03",
    ),
    "x_displacement_rms": Range(
        "x-chain displacement (rms per pixel)",
        0.001,
        0.5,
        1,
        "a grey level is 0.008; a displacement of 1 replaces the image",
    ),
    "z_displacement_rms": Range(
        "z-chain displacement (rms per latent dimension)",
        0.01,
        1.2,
        3,
        "latents have standard deviation 1; a larger displacement discards what was inferred",
    ),
    "grad_norm_energy": Range(
        "gradient norm of E",
        MIN_GRAD_NORM,
        1e3,
        1e5,
        "0.1 to 4 on digits, 0.2 to 200 on CIFAR-10; the range is multiplied by `teaching.energy_weight`",
    ),
    "grad_norm_generator": Range(
        "gradient norm of G",
        MIN_GRAD_NORM,
        1e5,
        1e7,
        "the loss is a sum over pixels: 9 to 500 on digits, 90 to 20,000 on CIFAR-10",
    ),
    "grad_norm_inference": Range(
        "gradient norm of I",
        MIN_GRAD_NORM,
        1e4,
        1e6,
        "4 to 35 on digits, 50 to 300 on CIFAR-10",
    ),
}


def healthy_ranges(config: Config) -> dict[str, Range]:
    """`HEALTHY_RANGES` for this config.

    The gradient of E scales with the weight of its loss. Samples that are not images have no known scale, and their
    x-chain may replace them, as one at temperature 1 does.
    """
    norm, weight = HEALTHY_RANGES["grad_norm_energy"], config.teaching.energy_weight
    scaled = replace(norm, low=norm.low * weight, high=norm.high * weight, limit=norm.limit * weight)
    ranges = HEALTHY_RANGES | {"grad_norm_energy": scaled}
    if not config.data.is_image:
        any_distance = Range("x-chain displacement (rms per dimension)", 0, math.inf, math.inf, "of unknown scale")
        ranges["x_displacement_rms"] = any_distance
    return ranges


def table() -> str:
    """`HEALTHY_RANGES` as the Markdown table of docs/guide/health.md."""
    lines = ["| statistic | meaning | healthy | error | reason |", "| --- | --- | --- | --- | --- |"]
    for name, r in HEALTHY_RANGES.items():
        limit = f"beyond ±{r.limit:g}" if r.low < 0 else f"above {r.limit:g}"
        lines.append(f"| `{name}` | {r.description} | {r.low:g} to {r.high:g} | {limit} | {r.reason} |")
    return "\n".join(lines)
