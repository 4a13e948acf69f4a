"""The option --networks: modules of the user's own, imported because the user names them, never because a file does."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dualmcmc.utils.errors import UserError, first_line, sanitize

if TYPE_CHECKING:
    from dualmcmc.nets import Trio

Networks = Annotated[
    str | None,
    typer.Option(
        "--networks",
        metavar="MODULE:FUNCTION",
        help="Custom networks: a function without arguments that returns energy, generator and inference, imported "
        "from the current folder or Python's path.",
        show_default=False,
    ),
]


def import_networks(name: str | None) -> Trio | None:
    """The networks that MODULE:FUNCTION returns; None if there is no such option."""
    if name is None:
        return None
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserError(f"--networks {sanitize(name)}: use MODULE:FUNCTION, such as my_networks:build.")
    from dualmcmc.nets.custom import as_trio

    sys.path.insert(0, "")  # the current folder, as for python -m
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        networks = function()
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"--networks {sanitize(name)}: {type(error).__name__}: {first_line(error)}.") from error
    finally:
        sys.path.remove("")
    return as_trio(networks)
