"""The option --networks: modules of the user's own, imported because the user names them, never because a file does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer

from dualmcmc.utils.errors import UserError, first_line, sanitize

Networks = Annotated[
    str | None,
    typer.Option(
        "--networks",
        metavar="MODULE:FUNCTION",
        help="Custom networks: a function without arguments that returns energy, generator and inference (None for one "
        "that the method does not train), imported from the current folder or Python's path.",
        show_default=False,
    ),
]


def import_networks(name: str | None) -> Callable[[], Any] | None:
    """The function that MODULE:FUNCTION names; None if there is no such option."""
    if name is None:
        return None
    module_name, _, function_name = name.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        raise UserError(
            f"--networks {sanitize(name)}: give the module's name, such as my_networks:build, not its file."
        )
    if not module_name or not function_name.isidentifier():
        raise UserError(f"--networks {sanitize(name)}: use MODULE:FUNCTION, such as my_networks:build.")
    sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        with _one_line_errors(name):
            function = getattr(importlib.import_module(module_name), function_name)
    finally:
        sys.path.remove("")
    from torch import nn

    if not callable(function) or isinstance(function, nn.Module):
        raise UserError(f"--networks {sanitize(name)}: '{sanitize(function_name)}' is not a function.")

    def build() -> Any:
        with _one_line_errors(name):
            return function()

    return build


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """The user's code may raise anything; what it prints is not the command's output."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise UserError(f"--networks {sanitize(name)}: {type(error).__name__}: {first_line(error)}.") from error
