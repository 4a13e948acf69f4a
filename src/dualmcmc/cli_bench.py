"""The commands `dualmcmc bench ...`: they parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dualmcmc import settings
from dualmcmc.cli_data import Json, print_json
from dualmcmc.config import Config
from dualmcmc.errors import UserError

bench = typer.Typer(rich_markup_mode=None)

Changes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, such as train.batch=64 or sampling.batch=100.",
        show_default=False,
    ),
]


def _config(preset: str, overrides: list[str] | None) -> Config:
    """Settings of a preset with changes; a call may leave the preset out and begin with a change."""
    words = [preset, *(overrides or [])]
    return settings.load_config("digits", words) if "=" in preset else settings.load_config(preset, words[1:])


def say(text: str) -> None:
    """What is being done, beside the result."""
    print(text, file=sys.stderr)


@bench.callback(invoke_without_command=True)
def bench_iteration(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="Whose networks and chains.")] = "digits",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting to change; may be repeated.", show_default=False),
    ] = None,
    second_x_chain: Annotated[
        bool, typer.Option("--second-x-chain", help="The authors' form, with two x-chains an iteration.")
    ] = False,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Check and time the plain eager reference too.")
    ] = True,
    repeats: Annotated[int, typer.Option(help="Iterations that are timed.", min=1)] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure speed: of an iteration, or with a command below of its growth, of data, of evaluation.

    Times an iteration, its chains and its updates beside a plain eager reference and the chip's own limits. The
    engine's numbers are first checked against the reference's. Images are random bytes, weights are new.

    \b
    Examples:
      dualmcmc bench
      dualmcmc bench --preset cifar10-resnet --set engine.precision=tf32
    """
    if context.invoked_subcommand is not None:
        if changes or second_x_chain or as_json or (preset, reference, repeats, device) != ("digits", True, 10, "auto"):
            raise UserError(f"options go after the command: dualmcmc bench {context.invoked_subcommand} ...")
        return
    from dualmcmc.bench.iteration import in_words, measure
    from dualmcmc.progress import show

    wanted = [*(changes or []), *(["teaching.second_x_chain=true"] if second_x_chain else [])]
    result = measure(settings.load_config(preset, wanted), device, repeats, reference, say, show)
    if as_json:
        print_json(result)
    else:
        print(in_words(result))


@bench.command("data")
def bench_data(
    preset: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET",
            help="Whose images and training step. [default: digits' networks on 64x64 RGB]",
            show_default=False,
        ),
    ] = None,
    overrides: Changes = None,
    images: Annotated[int, typer.Option(help="How many images to generate.", min=100)] = 200_000,
    seconds: Annotated[float, typer.Option(help="Time for each measurement.", min=0.05)] = 3.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to put the generated file, say on the disk to measure.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Images a second of every way to feed a training step, beside what the step itself can take.

    Generates a packed set, reads it from the device's memory, from RAM and from the file, decodes PNG and
    JPEG, trains on the file as it streams, and prints peak memory.
    """
    from dualmcmc.bench.data import in_words, measure

    changes = list(overrides or [])
    if preset is None or "=" in preset:
        changes = ["data.size=64", "data.channels=3", *([preset] if preset else []), *changes]
        preset = "digits"
    result = measure(settings.load_config(preset, changes), images, seconds, folder, device, say)
    if as_json:
        print_json(result)
    else:
        print(in_words(result))


@bench.command("growth")
def bench_growth(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Whose networks and chains.")] = "digits",
    overrides: Changes = None,
    out: Annotated[Path | None, typer.Option(help="FILE.png for the plot. [default: none]", show_default=False)] = None,
    repeats: Annotated[int, typer.Option(help="Iterations that are timed.", min=1)] = 10,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """How the time of an iteration grows with k_x, k_z, the batch and the pixels, and how straight that line is."""
    from dualmcmc.bench.growth import in_words, measure, save_plot
    from dualmcmc.files import check_target
    from dualmcmc.progress import show

    if out is not None:
        check_target(out, ".png")
    result = measure(_config(preset, overrides), device, repeats, say, show)
    if out is not None:
        save_plot(result, out)
    if as_json:
        print_json(result)
        return
    print(in_words(result))
    if out is not None:
        print(f"picture: {out}")


@bench.command("evaluate")
def bench_evaluate(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Whose networks and x-chain.")] = "digits",
    overrides: Changes = None,
    samples: Annotated[int, typer.Option(help="Samples of each kind.", min=100)] = 50_000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """How long samples and their FID take: drawing, Inception's features, the distance.

    Networks and Inception have random weights, which cost the same: nothing needs to be trained or fetched.
    """
    from dualmcmc.bench.evaluate import in_words, measure
    from dualmcmc.progress import show

    result = measure(_config(preset, overrides), samples, device, say, show)
    if as_json:
        print_json(result)
    else:
        print(in_words(result))
