"""`dualmcmc paper`: the paper's tables, measured again."""

from __future__ import annotations

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dualmcmc.cli.options import Device, Json, import_torch, path_parser, print_json, show, waiting
from dualmcmc.paper.experiments import EXPERIMENTS
from dualmcmc.utils.errors import UserError, nearest
from dualmcmc.utils.files import expand_user

app = typer.Typer(help="Measure the paper's tables again, beside its numbers.", rich_markup_mode=None)
SCALE_NAMES = ("smoke", "short", "full")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show(context.get_help())


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the experiments, and the runs that each needs."""
    if as_json:
        print_json({name: {"title": e.title, "runs": e.variants} for name, e in EXPERIMENTS.items()})
        return
    for name, experiment in EXPERIMENTS.items():
        show(f"{name:<14} {experiment.title}: {', '.join(experiment.variants)}")


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Its name ('dualmcmc paper list'), or all.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to change in all runs.", show_default=False),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: tiny, a minute on a CPU. short: CIFAR-10, 25 minutes of a GPU per experiment, shared evenly. "
            "full: the paper's networks and schedule."
        ),
    ] = "smoke",
    out: Annotated[Path, typer.Option(help="Folder for runs and tables.", parser=path_parser("--out"))] = Path("paper"),
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train the runs of an experiment, measure them, and print our figures beside the paper's.

    Writes the table as Markdown, CSV and HTML. Runs are shared by the experiments, continued where they were stopped,
    and not repeated. docs/paper-numbers.md says what can be compared.

    \b
    Examples:
      dualmcmc paper run table-simple
      dualmcmc paper run all --scale smoke
      dualmcmc paper run table-mse --scale short --device cuda seed=1 --out paper-seed1
    """
    names = list(EXPERIMENTS) if experiment == "all" else [experiment]
    for name in names:
        if name not in EXPERIMENTS:
            raise UserError(
                f"unknown experiment '{name}': use {', '.join(EXPERIMENTS)} or all.{nearest(name, EXPERIMENTS)}"
            )
    if scale not in SCALE_NAMES:
        raise UserError(f"--scale {scale}: use {', '.join(SCALE_NAMES)}.{nearest(scale, SCALE_NAMES)}")
    import_torch()
    from dualmcmc.paper.run import check_device, run_experiment
    from dualmcmc.paper.runs import Stopped
    from dualmcmc.tasks.fid import load_features
    from dualmcmc.utils.progress import show_progress
    from dualmcmc.utils.reporter import make_reporter

    target, features = check_device(scale, device), None
    if scale != "smoke" and any("samples" in EXPERIMENTS[name].measures for name in names):
        with waiting("loading Inception"):
            features = load_features(device=target)
    reporter = make_reporter()
    tables = {}
    for name in names:
        try:
            tables[name] = run_experiment(
                name,
                scale,
                expand_user(out),
                device,
                list(overrides or []),
                features,
                reporter,
                reporter.message,
                show_progress,
            )
        except Stopped as stopped:
            reporter.message(str(stopped))
            raise typer.Exit(128 + signal.Signals[stopped.reason]) from None
        if not as_json:
            for line in ["", *tables[name].text(), f"table: {out / f'{name}-{scale}.md'}, .csv, .html"]:
                show(line)
    if as_json:
        print_json({name: asdict(table) for name, table in tables.items()})
