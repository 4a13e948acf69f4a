"""Is a run training well? Its log, judged by the checks of `health`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.health import Finding, History, examine, verdict
from dualmcmc.health.findings import format_findings, healthy_ranges
from dualmcmc.report.curves import plot_log
from dualmcmc.utils.errors import UserError, printable
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.images import Picture


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a run, and the findings it rests on."""

    verdict: str  # healthy, warning or unhealthy
    images: int
    findings: list[Finding]
    history: History = field(repr=False)
    config: Config = field(repr=False)

    def __str__(self) -> str:
        count, noun = len(self.history.lines), self.config.data.noun
        first = f"{self.verdict} ({self.images:,} {noun}, {count:,} log line{'s' * (count != 1)})"
        return printable("\n".join([first, *format_findings(self.findings)]))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def curves(self) -> Picture:
        """The log's curves with their healthy ranges; Jupyter shows them."""
        bands = {name: (span.low, span.high) for name, span in healthy_ranges(self.config).items()}
        return Picture(plot_log(self.history.lines, bands))


def doctor(run_folder: str | Path) -> Diagnosis:
    """Whether a run looks healthy, and what to change. Reads the log alone, so the run may be training or stopped."""
    folder = RunFolder(expand_user(run_folder))
    folder.require_run()
    if not folder.log.is_file():
        raise UserError(f"'{folder.root}' has no log.jsonl: train there first, or choose another run.")
    config, log = config_io.load_stored_config(folder.config), read_log(folder.log)
    history = History(log)
    findings = examine(log, config)
    return Diagnosis(verdict(findings), history.images, findings, history, config)
