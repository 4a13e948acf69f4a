"""The command `dualmcmc doctor`: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualmcmc import settings
from dualmcmc.cli_data import Json, print_json
from dualmcmc.errors import UserError
from dualmcmc.files import check_target

if TYPE_CHECKING:
    from dualmcmc.report.findings import Finding


def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="FILE.png: the curves of the log, healthy ranges shaded.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether a run looks healthy, and what to change.

    Reads the log alone, so the run may be training, stopped, killed or diverged. docs/health.md explains every
    number. Exit codes: 0 healthy or worth a look, 1 unhealthy, 2 bad input.
    """
    from dualmcmc.engine import journal
    from dualmcmc.engine.folder import RunFolder
    from dualmcmc.report.doctor import examine
    from dualmcmc.report.findings import verdict
    from dualmcmc.report.history import History

    folder = RunFolder(run.expanduser())
    folder.require_run()
    if not folder.log.is_file():
        raise UserError(f"'{folder.root}' holds no log.jsonl: train there first, or name another run.")
    if out is not None:
        check_target(out, ".png")
    config, log = settings.load_config(str(folder.config)), journal.read(folder.log)
    findings, history = examine(log, config), History(log)
    if out is not None:
        from dualmcmc.pictures import save_png
        from dualmcmc.report.figures import draw
        from dualmcmc.report.ranges import healthy

        bands = {name: (span.low, span.high) for name, span in healthy(config).items()}
        save_png(draw(history.lines, bands), out)
    said = verdict(findings)
    if as_json:
        facts = {"run": str(folder.root), "verdict": said, "images": history.images, "lines": len(history.lines)}
        print_json({**facts, "findings": [vars(f) for f in findings], "file": None if out is None else str(out)})
    else:
        print(f"{said} (images: {history.images:,}, lines of the log: {len(history.lines):,})")
        for line in _in_lines(findings):
            print(line)
        if out is not None:
            print(f"picture: {out}")
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def _in_lines(findings: list[Finding]) -> list[str]:
    """The ill first, then what is worth a look, then all that is fine in one line."""
    lines = []
    for level in ("bad", "watch"):
        for finding in findings:
            if finding.level == level:
                lines += [f"{level:<6} {finding.what}: {finding.words}", f"advice {finding.advice}"]
    lines += [f"note   {finding.words}" for finding in findings if finding.level == "ok" and finding.what == "log"]
    fine = [finding.what for finding in findings if finding.level == "ok" and finding.what != "log"]
    return [*lines, f"fine   {', '.join(fine)}"] if fine else lines
