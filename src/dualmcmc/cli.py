"""The command `dualmcmc`: parses, calls, prints. Anything heavy is imported where it is used."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dualmcmc import __version__, cli_bench, cli_data, cli_doctor, cli_export, cli_measure, cli_tasks, settings
from dualmcmc.cli_data import Json, print_json
from dualmcmc.cli_options import Average, Device, Seed, refuse_a_crew, working_crew
from dualmcmc.config import Config
from dualmcmc.crew import is_launched, rank_given
from dualmcmc.errors import Diverged, ProcessLost, UserError, nearest
from dualmcmc.files import check_target
from dualmcmc.words import plain

app = typer.Typer(
    help="Train an energy-based model, a generator and an inference model together by dual-MCMC teaching "
    "(Cui and Han, NeurIPS 2023), and use the trained three.\n\n"
    "Start with: dualmcmc train && dualmcmc report runs/digits",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
IN_A_CREW = ("train", "sample", "evaluate")  # what several processes do together
app.add_typer(cli_data.data, name="data")
app.add_typer(cli_bench.bench, name="bench")


def _complete_preset(incomplete: str) -> list[str]:
    return [name for name in settings.preset_names() if name.startswith(incomplete)]


def _complete_setting(incomplete: str) -> list[str]:
    return [f"{key}=" for key in settings.setting_names() if key.startswith(incomplete)]


Preset = Annotated[
    str | None,
    typer.Argument(
        metavar="PRESET",
        help="A preset ('dualmcmc presets') or a settings file, FILE.yaml.",
        autocompletion=_complete_preset,
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, such as train.batch=64 ('dualmcmc config PRESET' lists them).",
        autocompletion=_complete_setting,
        show_default=False,
    ),
]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    elif is_launched() and context.invoked_subcommand not in IN_A_CREW:
        refuse_a_crew(context.invoked_subcommand)


@app.command()
def train(
    preset: Preset = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/PRESET]", show_default=False)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, exactly where it was.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Short for seed=N.", show_default=False)] = None,
    device: Device = "auto",
    max_images: Annotated[
        int | None,
        typer.Option(help="Stop once the run has seen this many images; --resume goes on.", show_default=False),
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after this long; --resume goes on.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a preset in a run folder.

    Writes config.yaml, log.jsonl, TensorBoard curves, sample grids, a snapshot for sampling and full
    states to resume from. Ctrl-C (or SIGTERM) saves and stops. Exit codes: 0 done, 2 bad input,
    3 diverged, 4 another process of several was lost, 130 and 143 stopped by a signal (of each
    process; a launcher has its own).

    \b
    Examples:
      dualmcmc train                          the default preset, digits
      dualmcmc train mnist --out runs/m --device cuda    after: dualmcmc data fetch mnist
      dualmcmc train --resume --out runs/m    go on after a stop
      torchrun --nproc_per_node=8 -m dualmcmc train cifar10-resnet train.batch=800    eight GPUs
    """
    preset, changes = _words(preset, overrides)
    if seed is not None:
        changes.append(f"seed={seed}")
    folder = out or Path("runs") / Path(preset or "digits").stem

    def chosen() -> Config:
        for name, limit in (("--max-images", max_images), ("--max-minutes", max_minutes)):
            if limit is not None and not limit > 0:
                raise UserError(f"{name} must be greater than 0, not {limit}.")
        if not resume:
            return settings.load_config(preset or "digits", changes)
        from dualmcmc.engine.loop import resumed_config

        return resumed_config(folder, changes, preset)

    with working_crew(device) as crew:
        config = crew.from_first(chosen)

        from dualmcmc.data.machine import in_words
        from dualmcmc.engine import loop
        from dualmcmc.engine.progress import reporter

        outcome = loop.train(config, folder, device, resume, max_images, max_minutes, reporter(), crew)
    unfinished = outcome.why != "finished"
    if not crew.leads:
        pass
    elif as_json:
        print_json({**vars(outcome), "folder": str(outcome.folder)})
    else:
        print(
            f"{'stopped (' + outcome.why + ')' if unfinished else 'trained'}: {outcome.images:,} images, "
            f"{outcome.iterations:,} iterations, {outcome.seconds / 60:.1f} minutes ({outcome.engine}), "
            f"peak memory {in_words(outcome.peak_memory)}"
        )
        print(f"run folder  {folder}")
        print(f"samples     {folder / 'samples'}")
        print(f"curves      tensorboard --logdir {folder / 'tensorboard'}")
        if unfinished:
            print(f"go on       dualmcmc train --resume --out {folder}")
        print(f"look        dualmcmc report {folder}")
    if outcome.why in ("SIGINT", "SIGTERM"):
        raise typer.Exit(128 + signal.Signals[outcome.why])


for _command in (*cli_tasks.COMMANDS, *cli_measure.COMMANDS, cli_doctor.doctor, cli_export.export):
    app.command()(_command)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="FILE.html. [default: report.html in RUN]", show_default=False)
    ] = None,
    seed: Seed = 0,
    ema: Average = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run.

    Numbers, samples, both chains as film strips with their profiles, curves, timings and settings.
    """
    from dualmcmc.engine.folder import RunFolder
    from dualmcmc.report.page import WORDS, write_report

    folder = RunFolder(run)
    folder.require_run()
    if out is not None:
        check_target(out, ".html")
    path, numbers = write_report(folder, device, out, ema, seed)
    if as_json:
        print_json({"file": str(path), "seed": seed, "ema": ema, **numbers})
        return
    for key, words in WORDS.items():
        if key in numbers:
            print(f"{numbers[key]:8.4f}  {words}")
    print(f"measured on {numbers['measured_on']}" + (f", {numbers['samples']} samples" if "samples" in numbers else ""))
    print(f"report: {path}")


@app.command()
def presets(as_json: Json = False) -> None:
    """List the presets."""
    rows = [(name, settings.load_config(name)) for name in settings.preset_names()]
    if as_json:
        print_json(
            {
                name: {
                    "description": c.description,
                    "size": c.data.size,
                    "channels": c.data.channels,
                    "kind": c.nets.kind,
                    "width": c.nets.energy_width,
                }
                for name, c in rows
            }
        )
        return
    print(f"{'preset':<20} {'pixels':>7} {'nets':<7} {'width':>5}")
    for name, c in rows:
        print(
            f"{name:<20} {c.data.size:>3}x{c.data.size:<3} {c.nets.kind:<7} {c.nets.energy_width:>5}  {c.description}"
        )


@app.command("config")
def show_config(preset: Preset = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print every setting of a preset, explained.

    The output is YAML; 'dualmcmc train FILE.yaml' reads it.
    """
    preset, changes = _words(preset, overrides)
    chosen = settings.load_config(preset or "digits", changes)
    if as_json:
        print_json(settings.to_tree(chosen))
    else:
        print(settings.render(chosen), end="")


def _words(preset: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """A call may leave the preset out and begin with a setting."""
    changes = list(overrides or [])
    return (None, [preset, *changes]) if preset is not None and "=" in preset else (preset, changes)


def main() -> None:
    """Run the command; bad input is one line on standard error and exit code 2."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    stopped_by: list[int] = []

    def stop(number: int, frame: Any) -> None:
        """Leave in good order: what is half written is removed on the way out. Training has a handler of its own."""
        stopped_by.append(number)
        sys.unraisablehook = lambda _: None  # what is dropped half made may complain, also after this function
        sys.exit(128 + number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup wants to live on
            signal.signal(number, stop)
    try:
        _run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if stopped_by:  # whatever the way out tripped over
            sys.exit(128 + stopped_by[0])


def _run() -> None:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be dealt with
    except UserError as error:
        code = _complain(str(error), 2)
    except Diverged as error:
        code = _complain(str(error), 3)
    except ProcessLost as error:
        code = _complain(str(error), 4)
    except BrokenPipeError:  # the reader of our output has gone: `dualmcmc presets | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _complain(f"{error.filename or 'the system'}: {error.strerror or error}.", 2)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):  # torch's two ways
            sys.exit(
                _complain(
                    "out of memory: lower train.batch or engine.micro_batch in training, --batch or -n elsewhere.", 2
                )
            )
        if not hasattr(error, "format_message"):  # not the command line's own complaint: a bug
            raise
        code = _complain(_usage(error), 2)
    sys.exit(code or 0)


def _usage(error: Any) -> str:
    """What is wrong with the words of a call, in one line."""
    text = " ".join(str(error.format_message()).split())
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    names += [group.name for group in app.registered_groups if isinstance(group.name, str)]
    asked = text.partition("'")[2].partition("'")[0]
    hint = nearest(asked, names) if text.startswith("No such command") and "Did you mean" not in text else ""
    context = getattr(error, "ctx", None)
    if text.startswith("No such command") and context and context.info_name == "bench":
        hint = " Name a preset with --preset and settings with --set."
    return f"{text.rstrip('.')}.{hint} See {context.command_path if context else 'dualmcmc'} --help."


def _complain(text: str, code: int) -> int:
    line = f"{f'process {rank_given()}: ' if rank_given() > 0 else ''}{text}"
    print(f"error: {plain(line, 10_000)}", file=sys.stderr)  # nothing in a file's name can talk to the terminal
    return code
