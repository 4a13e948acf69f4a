"""Commands that take a preset: train, presets, config, bench."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dualmcmc import config_io
from dualmcmc.cli.networks import Networks, import_networks
from dualmcmc.cli.options import (
    MAX_SEED,
    Device,
    Json,
    Overrides,
    Preset,
    import_torch,
    number,
    preset_config,
    print_json,
    show,
    split_target,
)
from dualmcmc.cli.options import distributed_session as session
from dualmcmc.config import Config
from dualmcmc.hub import parse_name
from dualmcmc.pretrained import PRETRAINED
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.files import expand_user
from dualmcmc.utils.progress import discard_output

if TYPE_CHECKING:
    from dualmcmc.engine.trainer import TrainResult

MAX_REPEATS = 100_000


def train(
    target: Preset = None,
    overrides: Overrides = None,
    out: Annotated[
        str | None, typer.Option(metavar="<path>", help="Run folder. [default: runs/TARGET]", show_default=False)
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Start from the weights of a run, snapshot, pretrained name or hf://…; the same as train.init=RUN.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out exactly.")] = False,
    max_images: Annotated[
        int | None, number("--max-images", help="Stop after this many images in total.", low=1, show_default=False)
    ] = None,
    max_minutes: Annotated[
        float | None, number("--max-minutes", help="Stop after this time.", kind=float, show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        number(
            "--seed", help="Seed of all random numbers; the same as seed=N.", low=0, high=MAX_SEED, show_default=False
        ),
    ] = None,
    networks: Networks = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a preset or config file in a run folder.

    Writes config.yaml, log.jsonl, curves (train.trackers), sample grids, a snapshot for sampling and full states to
    resume from. Ctrl-C, SIGTERM and SIGHUP (a lost connection) save and stop; --resume continues. Exit codes: 0
    success, 2 bad input, 3 diverged, 4 another process was lost, 129, 130 and 143 stopped by a signal. Several
    processes wait DUALMCMC_CONNECT_TIMEOUT seconds (300) to connect, and DUALMCMC_STALL_TIMEOUT (600) for one that does
    not respond.

    \b
    Examples:
      dualmcmc train
      dualmcmc train mnist --out runs/mnist --device cuda
      dualmcmc train --resume --out runs/mnist
      dualmcmc train cifar10-simple data.source=folder data.path=photos/ --init cifar10-simple --out runs/photos
      torchrun --nproc_per_node=8 -m dualmcmc train cifar10-resnet train.batch=800
    """
    preset, changes = split_target(target, overrides)
    name = "digits" if preset is None else preset
    if seed is not None:
        changes.append(f"seed={seed}")
    if init is not None:
        changes.append(f"train.init={init}")
    if out is not None and parse_name(out):
        raise UserError(f"--out {sanitize(out)}: this is the name of weights on the Hub, choose a folder.")
    for option, text in (("--out", out), ("--init", init)):
        if text is not None and text.strip() in ("", "null"):
            raise UserError(f"{option} '{text}' names no run.")
    folder = Path("runs") / Path(name).stem if out is None else expand_user(out)

    def load_config() -> Config:
        for option, value in (("--max-images", max_images), ("--max-minutes", max_minutes)):
            if value is not None and not value > 0:
                raise UserError(f"{option} must be greater than 0, not {value}.")
        if not resume:
            return config_io.load_config(name, changes)
        from dualmcmc.engine.resume import resumed_config

        return resumed_config(folder, changes, preset)

    with session(device) as world:
        config = world.on_main(load_config)

        import_torch()
        from dualmcmc.engine import trainer
        from dualmcmc.utils.reporter import make_reporter

        with world.fail_together():
            custom = import_networks(networks)
        result = trainer.train(
            config,
            folder,
            device,
            resume,
            max_images,
            max_minutes,
            networks=custom,
            reporter=make_reporter(),
            world=world,
        )
    try:
        if world.is_main:
            _print_result(result, folder, networks, as_json)
    except BrokenPipeError:  # the reader has exited; what matters is the exit code
        discard_output(sys.stdout.fileno())
    if result.stop_reason.startswith("SIG"):
        raise typer.Exit(128 + signal.Signals[result.stop_reason])


def _print_result(result: TrainResult, folder: Path, networks: str | None, as_json: bool) -> None:
    from dualmcmc.utils.device import format_bytes

    if as_json:
        print_json({**vars(result), "folder": str(result.folder)})
    else:
        finished = result.stop_reason == "finished"
        option = "" if networks is None else f" --networks {networks}"
        show(
            f"{'finished' if finished else f'stopped ({result.stop_reason})'}: {result.images:,} images, "
            f"{result.iterations:,} iterations, {result.seconds / 60:.1f} minutes ({result.engine}), "
            f"peak memory {format_bytes(result.peak_memory)}"
        )
        show(f"run folder  {folder}")
        show(f"samples     {folder / 'samples'}")
        if (folder / "tensorboard").is_dir():
            show(f"curves      tensorboard --logdir {folder / 'tensorboard'}")
        if not finished:
            show(f"continue    dualmcmc train --resume --out {folder}{option}")
        show(f"report      dualmcmc report {folder}{option}")
    sys.stdout.flush()


def presets(as_json: Json = False) -> None:
    """List the presets."""
    configs = {name: config_io.load_config(name) for name in config_io.preset_names()}
    if as_json:
        print_json(
            {
                name: {
                    "description": config.description,
                    "size": config.data.size,
                    "channels": config.data.channels,
                    "kind": config.nets.kind,
                    "width": config.nets.energy_width,
                    "pretrained": name in PRETRAINED,
                }
                for name, config in configs.items()
            }
        )
        return
    show(f"{'preset':<22} {'pixels':>7} {'nets':<6} {'width':>5}  {'weights':<8} description")
    for name, config in configs.items():
        custom, weights = config.nets.kind == "custom", "yes" if name in PRETRAINED else "-"
        pixels = "-" if custom else f"{config.data.size}x{config.data.size}"
        nets = f"{config.nets.kind:<6} {'-' if custom else config.nets.energy_width:>5}"
        show(f"{name:<22} {pixels:>7} {nets}  {weights:<8} {config.description}")


def config(target: Preset = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print every setting of a preset, with explanations.

    The output is YAML: edit it and train it with 'dualmcmc train FILE.yaml'.
    """
    chosen = preset_config(target, overrides)
    if as_json:
        print_json(config_io.to_tree(chosen))
    else:
        show(config_io.render(chosen), end="")


def bench(
    target: Preset = None,
    overrides: Overrides = None,
    reference: Annotated[
        bool, typer.Option("--reference/--no-reference", help="Compare with the eager reference.")
    ] = True,
    repeats: Annotated[int, number("--repeats", help="Timed iterations.", low=1, high=MAX_REPEATS)] = 10,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time a training iteration, its chains and its updates.

    The engine's losses are first checked against a plain eager reference, then both are timed beside the hardware's
    limits. Images are random, weights untrained.

    \b
    Examples:
      dualmcmc bench
      dualmcmc bench cifar10-resnet engine.precision=tf32
      dualmcmc bench cifar10-resnet teaching.second_x_chain=true
    """
    import_torch()
    from dualmcmc.bench.step import format_result, measure
    from dualmcmc.utils.progress import show_progress

    def notify(text: str) -> None:
        show(text, file=sys.stderr)

    chosen = preset_config(target, overrides)
    if chosen.nets.kind == "custom":
        raise UserError(
            "bench measures networks that settings describe; for custom ones, see the rate that training shows."
        )
    result = measure(chosen, device, repeats, reference, notify, show_progress)
    if as_json:
        print_json(result)
    else:
        show(format_result(result))


COMMANDS = (train, presets, config, bench)
