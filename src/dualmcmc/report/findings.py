"""What a doctor hands over: findings, the verdict on them, and advice as settings to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from dualmcmc.config import Config

Level = Literal["ok", "watch", "bad"]
VERDICTS: dict[Level, str] = {"bad": "unhealthy", "watch": "worth a look", "ok": "healthy"}  # the worst first


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str  # the number of the log, or the part of it
    words: str
    advice: str = ""  # settings to change, where it is not well

    def advising(self, advice: str) -> Finding:
        """The same with advice, where it needs any."""
        return self if self.level == "ok" else replace(self, advice=advice)


def verdict(findings: Sequence[Finding]) -> str:
    """The worst of them, in a word or three."""
    levels = {finding.level for finding in findings}
    return next((words for level, words in VERDICTS.items() if level in levels), VERDICTS["ok"])


def times(config: Config, key: str, factor: float) -> str:
    """A setting changed by a factor, as people write it."""
    value = attrgetter(key)(config)
    return f"{key}={max(1, round(value * factor))}" if isinstance(value, int) else f"{key}={value * factor:.4g}"


def calmer_energy(config: Config) -> str:
    """For an energy that runs ahead of the samples."""
    calmer = f"{times(config, 'optim.energy.lr', 0.5)} {times(config, 'teaching.x_chain.step_size', 0.5)}"
    return calmer if config.nets.spectral_norm else f"{calmer}; in a new run nets.spectral_norm=true"
