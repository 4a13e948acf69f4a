"""The command `dualmcmc export`: parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dualmcmc.cli_data import Json, print_json
from dualmcmc.cli_options import RunPath
from dualmcmc.errors import UserError
from dualmcmc.files import check_target


def export(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="FILE.safetensors.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "float16",
    as_json: Json = False,
) -> None:
    """Write a run's three networks and its settings into one small file, to keep or to give away.

    Every command that takes a snapshot takes that file. Nothing in it can run, and it does not say where the images
    lay.
    """
    from dualmcmc.tasks import export as task
    from dualmcmc.tasks.run import load

    if dtype not in task.TYPES:
        raise UserError(f"--dtype '{dtype}' is none of {', '.join(task.TYPES)}.")
    check_target(out, ".safetensors")
    if out.exists():
        raise UserError(f"'{out}' exists already: choose another --out.")
    numbers = task.export(load(run, "cpu"), out, dtype)
    if as_json:
        print_json({"file": str(out), **numbers})
        return
    print(f"weights: {out}, {numbers['bytes'] / 1e6:.1f} MB, {dtype}")
    print(f"rounding changed them by {numbers['relative_change']:.2g} (rms, relative)")
