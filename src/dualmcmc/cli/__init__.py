"""The command `dualmcmc`: parses, calls, prints. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated, Any

import typer

from dualmcmc import __version__
from dualmcmc.cli import data, evaluate, paper, tasks, train
from dualmcmc.cli.options import require_single_process
from dualmcmc.engine.distributed import env_rank, is_launched
from dualmcmc.utils.errors import Diverged, ProcessLost, UserError, nearest, sanitize
from dualmcmc.utils.progress import discard_output

DISTRIBUTED_COMMANDS = ("train", "sample", "evaluate")

app = typer.Typer(
    help="Train an energy-based model, a generator and an inference model by dual-MCMC teaching (Cui & Han, NeurIPS "
    "2023), and use them.\n\nStart with: dualmcmc train && dualmcmc report runs/digits",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for _command in (*train.COMMANDS, *tasks.COMMANDS, *evaluate.COMMANDS):
    app.command(_command.__name__.replace("_", "-"))(_command)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())
    elif is_launched() and context.invoked_subcommand not in DISTRIBUTED_COMMANDS:
        require_single_process(context.invoked_subcommand)


def main() -> None:
    """Run the command. Bad input is one line on standard error and exit code 2."""
    _prepare_streams()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    received: list[int] = []

    def stop(number: int, frame: Any) -> None:
        """Exit through the finally blocks, which remove half-written files. Training has its own handler."""
        received.append(number)
        sys.unraisablehook = lambda _: None  # objects dropped half-initialised may complain
        sys.exit(128 + number)

    for number, handler in previous.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    try:
        _run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if received:  # whatever went wrong on the way out
            sys.exit(128 + received[0])


def _prepare_streams() -> None:
    """Output never fails for want of a stream (`dualmcmc presets >&-`) or of a character in its encoding."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # otherwise a file of ours could become a stream
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # standard error has its own way


def _run() -> None:
    try:
        code = app(prog_name="dualmcmc", standalone_mode=False)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except UserError as error:
        code = _report_error(str(error), 2)
    except Diverged as error:
        code = _report_error(str(error), 3)
    except ProcessLost as error:
        code = _report_error(str(error), 4)
    except BrokenPipeError:  # the reader of our output has exited: `dualmcmc presets | head -1`
        discard_output(sys.stdout.fileno())
        code = 0
    except SystemExit:
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":  # with which click replaces a broken pipe
            raise
        code = 0
    except OSError as error:
        code = _report_error(f"{error.filename or 'system error'}: {error.strerror or error}.", 2)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):  # torch has two of them
            advice = "lower train.batch or engine.micro_batch in training, --batch or -n elsewhere."
            sys.exit(_report_error(f"out of memory: {advice}", 2))
        if not hasattr(error, "format_message"):  # not a usage error of the command line: a bug
            raise
        code = _report_error(_usage_error(error), 2)
    sys.exit(code or 0)


def _usage_error(error: Any) -> str:
    """A usage error of the command-line library in one line, in our words."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    option = str(getattr(error, "option_name", ""))
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    name = parameter.opts[0] if parameter is not None else ""
    kind = type(error).__name__
    if kind == "NoSuchOption":
        known = [word for entry in context.command.params for word in entry.opts] if context else []
        text = f"unknown option {option}.{nearest(option, [word for word in known if word.startswith('-')])}"
    elif kind == "MissingParameter":
        label = name if name.startswith("-") else parameter.metavar
        help_text = parameter.help.rstrip(".")
        is_word = help_text[1:2].islower()  # not FILE.png
        text = f"{label} is missing: {help_text[:1].lower() + help_text[1:] if is_word else help_text}."
    elif kind == "BadOptionUsage":
        text = f"{option} takes no value." if "does not take" in text else f"{option} needs a value."
    elif text.startswith("No such command"):
        word = text.partition("'")[2].partition("'")[0]
        text = f"unknown command '{word}'.{nearest(word, context.command.commands)}"
    elif text.startswith("Got unexpected extra"):
        text = f"unexpected argument '{text.partition(' (')[2].rstrip(')')}'."
    else:  # such as a flag of the library that this version does not know
        text = f"{name}: {text}." if name else f"{text}."
    return f"{text} See {context.command_path if context else 'dualmcmc'} --help."


def _report_error(text: str, code: int) -> int:
    line = f"{f'rank {env_rank()}: ' if env_rank() > 0 else ''}{text}"
    print(f"error: {sanitize(line, 10_000)}", file=sys.stderr)  # file names cannot send control characters
    return code
