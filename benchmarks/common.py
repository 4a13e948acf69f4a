"""The command line of the benchmark scripts: `python benchmarks/SCRIPT.py [TARGET] [KEY=VALUE ...] [options]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from dualmcmc import config_io
from dualmcmc.config import Config
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.files import to_json


class Parser(argparse.ArgumentParser):
    """Errors are one line. `--device` and `--json` are common to all scripts, TARGET and KEY=VALUE to most."""

    def __init__(self, description: str | None, takes_config: bool = True) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if takes_config:
            self.add_argument("target", nargs="?", help="preset or settings file (default: digits)")
            self.add_argument(
                "settings", nargs="*", metavar="KEY=VALUE", help="settings to change, such as train.batch=64"
            )
        self.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
        self.add_argument("--json", action="store_true", help="print the result as one line of JSON")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def at_least(minimum: float, number: Callable[[str], float] = int) -> Callable[[str], float]:
    """An argument type: a number with a minimum."""

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum:g}, not {text}")
        return value

    return parse


def load_config(args: argparse.Namespace, defaults: Sequence[str] = ()) -> Config:
    """The settings of the command line; `defaults` apply if it names no target."""
    if args.target is None:
        return config_io.load_config("digits", defaults)
    if "=" in args.target:  # a setting: no target was named
        return config_io.load_config("digits", [*defaults, args.target, *args.settings])
    return config_io.load_config(args.target, args.settings)


def train_on_noise(config: Config, iterations: int, log_every: int, images: int) -> tuple[Config, Tensor]:
    """The settings to train for `iterations` on random data like the config's own, saving once, and the data."""
    count, data = config.train.batch * iterations, config.data
    schedule = replace(config.train, images=count, save_every=count, sample_every=count, log_every=log_every)
    values = torch.randint(0, 256, (max(images, config.train.batch), *data.sample_shape), dtype=torch.uint8)
    return replace(config, train=schedule, data=replace(data, source="custom")), values


def notify(text: str) -> None:
    """Show what is being done."""
    print(text, file=sys.stderr)


def print_result(result: dict[str, Any], as_json: bool, format_result: Callable[[dict[str, Any]], str]) -> None:
    """Print a result as JSON or as a table."""
    print(to_json(result) if as_json else format_result(result))


def run(main: Callable[[], None]) -> None:
    """Run a script; bad input is one line on standard error and exit code 2, an interrupt one line and 130."""
    try:
        main()
    except UserError as error:
        print(f"error: {sanitize(str(error), 10_000)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
