"""Health checks: is a run training well? Judged from its log and settings alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualmcmc.config import Config
from dualmcmc.health import checks, run_checks
from dualmcmc.health.findings import Finding, verdict
from dualmcmc.health.history import MIN_LINES, Entry, History

__all__ = ["Finding", "History", "examine", "verdict"]

CHECKS: tuple[Callable[[History, Config], list[Finding]], ...] = (
    checks.energy_gap,
    checks.spikes,
    checks.flat_energy,
    checks.energy_slope,
    checks.x_chain,
    checks.z_chain,
    checks.gradients,
    checks.reconstruction,
    checks.inference,
    run_checks.speed,
    run_checks.saves,
    run_checks.resumes,
)


def examine(log: Sequence[Entry], config: Config) -> list[Finding]:
    """The findings of all checks on a log from `read_log`; the run may be training or have ended."""
    history = History(log)
    findings = run_checks.divergence(history, config)
    count = len(history.lines)
    if count == 0:
        message = f"The log has no statistics yet: the first line is written after {config.train.log_every} iterations."
        return [*findings, Finding("warning", "log", message, "try again later")]
    findings += run_checks.finite(history, config)
    if count < MIN_LINES:  # too few for a trend, but a chain that diverges does so at once
        if all(finding.level != "error" for finding in findings):
            chains = [*checks.x_chain(history, config), *checks.z_chain(history, config)]
            findings += [finding for finding in chains if finding.level == "error"]
        message = f"The log is too short for the other checks: it has {count} of the {MIN_LINES} lines they need."
        return [*findings, Finding("ok", "log", message)]
    for check in CHECKS:
        findings += check(history, config)
    return findings
