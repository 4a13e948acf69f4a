"""Whether a run looks healthy, in plain words, from its log alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualmcmc.config import Config
from dualmcmc.report import checks, course
from dualmcmc.report.findings import Finding
from dualmcmc.report.history import MIN_LINES, Entry, History

CHECKS: tuple[Callable[[History, Config], list[Finding]], ...] = (
    checks.energy_gap,
    checks.spikes,
    checks.flat_energy,
    checks.x_chain,
    checks.z_chain,
    checks.gradients,
    checks.reconstruction,
    checks.inference,
    course.speed,
    course.saves,
    course.resumes,
)


def examine(log: Sequence[Entry], config: Config) -> list[Finding]:
    """All that can be said of a log as `journal.read` gives it, whether the run goes on or has ended."""
    history = History(log)
    findings = course.divergence(history, config)
    count = len(history.lines)
    if count == 0:
        words = f"The log has no numbers yet: the first come after {config.train.log_every} iterations."
        return [*findings, Finding("watch", "log", words, "look again later")]
    findings += course.finite(history, config)
    if count < MIN_LINES:
        chains = [*checks.x_chain(history, config), *checks.z_chain(history, config)]
        if all(found.level != "bad" for found in findings):  # else that says it already
            findings += [found for found in chains if found.level == "bad"]  # what runs away does so at once
        words = f"The log is too short to judge more than this: {MIN_LINES} lines of numbers will do, it has {count}."
        return [*findings, Finding("ok", "log", words)]
    for check in CHECKS:
        findings += check(history, config)
    return findings
