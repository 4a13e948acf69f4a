"""Options shared by the commands, and the frame around commands that use a trained run."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from dualmcmc import config_io
from dualmcmc.cli.networks import Networks, import_networks
from dualmcmc.config import Config
from dualmcmc.engine.distributed import SINGLE_PROCESS, World, env_rank, is_launched
from dualmcmc.pretrained import has_name, output_folder
from dualmcmc.utils.errors import UserError, printable, sanitize
from dualmcmc.utils.files import check_output, expand_user, make_folder, to_json
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress, waiting_for

if TYPE_CHECKING:
    from dualmcmc.tasks.inputs import TaskImages
    from dualmcmc.tasks.run import Run


def _complete_preset(incomplete: str) -> list[str]:
    return [name for name in config_io.preset_names() if name.startswith(incomplete)]


def _complete_setting(incomplete: str) -> list[str]:
    return [f"{key}=" for key in config_io.setting_names() if key.startswith(incomplete)]


def path_parser(name: str) -> Callable[[Any], Path]:
    """Paths as they are given, but not empty: Path("") would be the current folder."""

    def parse(text: Any) -> Path:
        if not str(text).strip():
            raise UserError(f"{name} is empty.")
        return Path(text)

    return parse


Preset = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="Preset ('dualmcmc presets') or config file, FILE.yaml. [default: digits]",
        autocompletion=_complete_preset,
        show_default=False,
    ),
]
RunTarget = Annotated[
    Path,
    typer.Argument(
        metavar="TARGET",
        help="Run folder, snapshot file, name of pretrained weights, or hf://USER/NAME[@REVISION].",
        parser=path_parser("TARGET"),
        show_default=False,
    ),
]
RunFolderTarget = Annotated[
    Path,
    typer.Argument(metavar="TARGET", help="Run folder.", parser=path_parser("TARGET"), show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings to change, such as sampling.steps=70 ('dualmcmc config' lists all).",
        autocompletion=_complete_setting,
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; mps is not supported.")]

MAX_NUMBER = 10**12  # of a numeric option without a limit of its own
MAX_SEED = 2**63 - 1


def number(
    name: str,
    *names: str,
    help: str,
    kind: type = int,
    low: float | None = None,
    high: float | None = None,
    **more: Any,
) -> Any:
    """A numeric option that says what it expects, instead of what the command-line library's parser expects."""
    words = {int: "an integer", float: "a number"}[kind]
    high = MAX_NUMBER if high is None else high
    expected = f"{words} up to {high:,}" if low is None else f"{words} from {low:,} to {high:,}"

    def parse(text: Any) -> Any:
        try:
            value = kind(text)
            valid = (low is None or value >= low) and value <= high
        except ValueError:
            valid = False
        if not valid:
            raise UserError(f"{name} {sanitize(str(text)) or repr('')}: use {expected}.")
        return value

    metavar = {int: "INTEGER", float: "NUMBER"}[kind]
    return typer.Option(name, *names, help=help, parser=parse, metavar=metavar, **more)


Seed = Annotated[int, number("--seed", help="Seed of all random numbers.", low=0, high=MAX_SEED)]
Ema = Annotated[bool, typer.Option("--ema/--no-ema", help="Use averaged weights, or those of the last iteration.")]
Batch = Annotated[
    int | None, number("--batch", help="Images per batch; the same as sampling.batch=N.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Folder, archive, packed file or image. [default: held-out images]",
        parser=path_parser("--images"),
        show_default=False,
    ),
]
Inception = Annotated[
    Path | None, typer.Option(help="Inception weights. [default: the fetched ones]", show_default=False)
]
TrustInception = Annotated[
    bool, typer.Option("--trust-inception", help="Load --inception even if it is unknown TorchScript, which is code.")
]


DEFAULT_NUM = "[default: all; on a CPU, about a minute's worth]"


def limit(help_text: str, low: int = 1) -> Any:
    """The option -n/--num with its meaning for one command."""
    return number("-n", "--num", help=help_text, low=low, show_default=False)


def show(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text that may contain what a file or a user named."""
    print(printable(text), file=file, end=end)


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(to_json(value))


def print_notes(notes: Sequence[str]) -> None:
    """Print notes beside the result, on standard error."""
    for note in notes:
        show(note, file=sys.stderr)


def split_list(option: str, text: str) -> list[str]:
    """Comma-separated words without duplicates."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(f"{option} is empty.")
    return list(dict.fromkeys(words))


def preset_config(target: str | None, overrides: list[str] | None) -> Config:
    """The config of TARGET and KEY=VALUE; TARGET may be omitted."""
    preset, changes = split_target(target, overrides)
    return config_io.load_config("digits" if preset is None else preset, changes)


def split_target(target: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """TARGET and the overrides; a first word with = is an override."""
    changes = list(overrides or [])
    return (None, [target, *changes]) if target is not None and "=" in target else (target, changes)


@contextmanager
def distributed_session(device: str) -> Iterator[World]:
    """The processes of this call, if a launcher started several."""
    world = SINGLE_PROCESS
    if is_launched():  # otherwise bad input is reported before torch is imported
        from dualmcmc.engine.ddp import connect

        world = connect(device)
    with world.detect_lost_process():
        yield world
    world.close()  # not after a failure: the others may be gone


def require_single_process(command: str) -> NoReturn:
    """Refuse a launcher for a command that does not distribute its work; rank 0 reports it."""
    if env_rank() > 0:
        raise typer.Exit(2)
    raise UserError(f"'{command}' runs in one process: call it without the launcher.")


class RunTask:
    """One call of a command on a trained run: loads the run, saves and prints the result."""

    def __init__(
        self,
        name: str,
        target: Path,
        overrides: list[str],
        out: Path | None,
        suffixes: tuple[str, ...],
        seed: int,
        ema: bool,
        device: str,
        as_json: bool,
        networks: str | None = None,
    ) -> None:
        self._networks = networks
        self.name, self.overrides, self.seed = name, overrides, seed
        self._target, self._ema, self._device, self._as_json = expand_user(target), ema, device, as_json
        self._start = time.monotonic()
        self._out, self._suffixes, self._writes_file = out, suffixes, bool(suffixes)
        self.out = out or output_folder(self._target) / f"{name}.png"
        self._made: list[Path] = []  # folders, the innermost first

    def load(self, world: World = SINGLE_PROCESS, defaults: Sequence[str] = ()) -> Run:
        """The run, with the overrides of this call on top of `defaults`; checks --out first."""
        if self._writes_file:
            self._check_out()  # here, where all processes fail together
        from dualmcmc.tasks.load import load
        from dualmcmc.utils.device import set_num_threads

        with waiting("loading the networks"):
            networks = import_networks(self._networks)
            overrides = [*defaults, *self.overrides]
            run = load(self._target, self._device, self._ema, self.seed, overrides, world, networks=networks)
        set_num_threads(run.config.engine.threads)
        return run

    def _check_out(self) -> None:
        folder = output_folder(self._target)
        if self._out is None and has_name(self._target):
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            make_folder(folder, "Pictures and results are written there.")
        if folder.is_dir() or self._out is not None:  # otherwise the run is missing, which `load` reports
            check_output(self.out, *self._suffixes)

    def remove_empty_folders(self) -> None:
        """Undo what `load` made, after a failure: folders in which nothing was written."""
        for folder in self._made:
            with suppress(OSError):  # not empty
                folder.rmdir()

    @contextmanager
    def distributed(self) -> Iterator[World]:
        """The processes of this call; see `progress_of`."""
        with distributed_session(self._device) as world:
            yield world

    def images(self, run: Run, path: Path | None, count: int | None = None, steps: int | None = None) -> TaskImages:
        """The images of a task: those at `path`, or the run's held-out ones; a subset as in `subset`."""
        from dualmcmc.tasks.inputs import images_for

        if path is not None and self.out.resolve().is_relative_to(path.resolve()):
            raise UserError(f"the picture '{self.out}' would be among the images: choose another --out.")
        images = images_for(run, path, show_progress)
        print_notes(images.origin["notes"])
        return self.subset(run, images, count, steps)

    def subset(self, run: Run, images: TaskImages, count: int | None, steps: int | None) -> TaskImages:
        """`count` of the images, if given; otherwise as many as are the default for the work of `steps` per image."""
        from dualmcmc.tasks.work import default_count, reduction_note

        if count is None and steps is not None:
            count = default_count(run, len(images.store), steps)
            print_notes(reduction_note((count, len(images.store), images.what)))
        elif count is not None and count > len(images.store):
            print_notes([f"-n {count} exceeds the {len(images.store):,} {images.what}: using all of them"])
        return images.subset(count, self.seed)

    def finish(self, run: Run, numbers: dict[str, Any], lines: Iterable[str], **facts: Any) -> None:
        """Save the result in the run folder and print it; if saving fails, print why, and the result."""
        from dualmcmc.tasks import record, results

        if not run.world.is_main:
            return
        if not record.is_finite(numbers):
            if not self._as_json:
                show("\n".join(lines))
            kept = f" '{self.out}' shows it; nothing was recorded." if self._writes_file else ""
            raise UserError(f"{self.name} gave non-finite values: the chain diverged.{kept} {record.REMEDY}")
        if self._writes_file:
            facts = {"file": str(self.out), **facts}
        entry = record.entry(run, self.name, time.monotonic() - self._start, numbers, **facts)
        path: Path | None = None
        try:
            path = record.save(entry, results.folder_for(self._target))
        except UserError as error:
            show(f"result not saved: {error}", file=sys.stderr)
        if self._as_json:
            print_json({**entry, "record": None if path is None else str(path)})
            return
        for line in lines:
            show(line)
        if self._writes_file:
            show(f"{'pixels' if self.out.suffix.lower() == '.npz' else 'picture'}: {self.out}")
        if path is not None:
            show(f"result: {path}")


def waiting(what: str) -> AbstractContextManager[None]:
    """Rank 0 says what all are waiting for."""
    return waiting_for(what) if env_rank() == 0 else nullcontext()


def import_torch() -> None:
    """Import PyTorch, which may take long; bad input that can be refused without it should be by then."""
    with waiting("loading PyTorch"):
        import torch  # noqa: F401


def progress_of(world: World) -> ProgressFactory:
    """Rank 0 shows the progress of all."""
    return show_progress if world.is_main else no_progress


def run_command(*suffixes: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command on a trained run: adds TARGET, KEY=VALUE and the common options to those of the function.

    `suffixes` are the file types it may write to --out; without any it has no --out.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.replace("_", "-")
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]  # without the task
        takes_images = any(parameter.name in ("images", "against") for parameter in own)

        def command(
            target: RunTarget,
            overrides: Overrides = None,
            out: Annotated[
                Path | None,
                typer.Option(
                    help=f"FILE{' or FILE'.join(suffixes)}. [default: {name}.png in the run folder]", show_default=False
                ),
            ] = None,
            seed: Seed = 0,
            batch: Batch = None,
            ema: Ema = True,
            networks: Networks = None,
            device: Device = "auto",
            as_json: Json = False,
            **options: Any,
        ) -> None:
            changes = [*(overrides or []), *([] if batch is None else [f"sampling.batch={batch}"])]
            for change in changes:
                if not takes_images and change.startswith(("data.crop=", "data.resize=", "data.skip_bad=")):
                    raise UserError(f"'{sanitize(change)}' does not apply to {name}: it reads no other images.")
            import_torch()
            task = RunTask(name, target, changes, out, suffixes, seed, ema, device, as_json, networks)
            try:
                function(task, **options)
            except BaseException:
                task.remove_empty_folders()
                raise

        frame = inspect.signature(command, eval_str=True, locals={**locals()}).parameters
        common = [
            frame[key]
            for key in (*(["out"] if suffixes else []), "seed", "batch", "ema", "networks", "device", "as_json")
        ]
        keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *common)]
        parameters = [frame["target"], frame["overrides"], *keyword_only]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__name__, command.__doc__ = name, function.__doc__
        return command

    return decorate
