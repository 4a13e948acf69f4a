"""What the commands that use a trained run share: their options, and how they begin and end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from dualmcmc.cli_data import CROP_NAMES, checked_crop, print_json
from dualmcmc.crew import ALONE, Crew, launch, rank_given
from dualmcmc.errors import UserError
from dualmcmc.files import check_target, make_folder
from dualmcmc.progress import Watch, quiet, show
from dualmcmc.published import file_of, home_of

if TYPE_CHECKING:
    from dualmcmc.tasks.inputs import Given
    from dualmcmc.tasks.run import Run

RunPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run folder, a snapshot file, or weights that come along.", show_default=False
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Average = Annotated[bool, typer.Option("--ema/--no-ema", help="Averaged weights, or those of the last iteration.")]
Seed = Annotated[int, typer.Option(help="Fixes all random numbers.", min=0)]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Steps of the x-chain, k_x. [default: the run's]", show_default=False)
]
StepSize = Annotated[
    float | None, typer.Option(help="Step size s of the x-chain. [default: the run's]", show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Of the x-chain: noise per step is sqrt(2 s T). [default: the run's]", show_default=False),
]
ZSteps = Annotated[
    int | None, typer.Option("--z-steps", help="Steps of the z-chain, k_z. [default: the run's]", show_default=False)
]
Batch = Annotated[
    int | None, typer.Option(help="Images worked on at once. [default: the run's sampling.batch]", show_default=False)
]
Images = Annotated[
    Path | None,
    typer.Option(
        help="Folder, archive, packed file or image. [default: the run's held-out images]", show_default=False
    ),
]
Only = Annotated[int | None, typer.Option("-n", help="Only so many images, chosen by --seed.", show_default=False)]
CropOption = Annotated[
    str | None,
    typer.Option("--crop", help=f"How to crop other images: {', '.join(CROP_NAMES)}. [default: the run's]"),
]
Picture = Annotated[
    Path | None, typer.Option("--out", help="FILE.png. [default: in RUN, named as the command]", show_default=False)
]
InceptionFile = Annotated[
    Path | None, typer.Option(help="Inception weights. [default: the fetched ones]", show_default=False)
]
TrustInception = Annotated[
    bool, typer.Option("--trust-inception", help="Load --inception FILE, whatever TorchScript it is: it is code.")
]


@contextmanager
def working_crew(device: str) -> Iterator[Crew]:
    """The processes of this call: those a launcher started, or this one alone."""
    crew = launch(device)
    with crew.watching():
        yield crew
    crew.close()  # not after a failure: the others may be gone


def refuse_a_crew(what: str) -> NoReturn:
    """For what one process does, and several would do several times; the first says so."""
    if rank_given() > 0:
        raise typer.Exit(2)
    raise UserError(f"'{what}' is for one process: call it without the launcher.")


def watch_for(crew: Crew) -> Watch:
    """Progress of long work: the first process shows it."""
    return show if crew.leads else quiet


class Job:
    """One call: it knows when it began, and records and prints how it ended."""

    def __init__(self, path: Path, task: str, out: Path | None, *endings: str) -> None:
        self.task, self._began = task, time.monotonic()
        self._path = path = path.expanduser()
        home = home_of(path)
        self.target = out or home / f"{task}.png"
        if out is None and file_of(path) is not None:
            make_folder(home, "Pictures and results are written there.")
        if home.is_dir() or out is not None:  # else the run is missing, which is better said of the run
            check_target(self.target, *(endings or (".png",)))

    def finish(
        self, run: Run, numbers: dict[str, Any], lines: Iterable[str], as_json: bool, picture: bool = True, **facts: Any
    ) -> None:
        """Record, then print: JSON, or lines for people. A folder that cannot be written to costs the record only.

        Of several processes, the first does.
        """
        from dualmcmc.tasks import record

        if not run.crew.leads:
            return
        if picture:
            facts = {"file": str(self.target), **facts}
        entry = record.entry(run, self.task, time.monotonic() - self._began, numbers, **facts)
        place: Path | None = None
        try:
            place = record.save(entry, record.folder_for(self._path))
        except UserError as error:
            print(f"not recorded: {error}", file=sys.stderr)
        if as_json:
            print_json({**entry, "record": None if place is None else str(place)})
            return
        for line in lines:
            print(line)
        if picture:
            print(f"{'pixels' if self.target.suffix.lower() == '.npz' else 'picture'}: {self.target}")
        if place is not None:
            print(f"record: {place}")


def load_run(
    path: Path,
    device: str,
    ema: bool,
    seed: int,
    steps: int | None = None,
    step_size: float | None = None,
    temperature: float | None = None,
    z_steps: int | None = None,
    batch: int | None = None,
    crew: Crew = ALONE,
) -> Run:
    """A run, with the options that say how its chains are used."""
    from dualmcmc.tasks.run import load

    chosen = {
        "sampling.steps": steps,
        "sampling.step_size": step_size,
        "sampling.temperature": temperature,
        "sampling.batch": batch,
        "teaching.z_chain.steps": z_steps,
    }
    overrides = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    return load(path, device, ema, seed, overrides, crew)


def given_images(
    run: Run, path: Path | None, crop: str | None, skip_bad: bool, job: Job, count: int | None = None
) -> Given:
    """A task's images; what a person should know of them is said. The picture must not lie among them."""
    from dualmcmc.tasks.inputs import images_for

    if path is None and (crop is not None or skip_bad):
        raise UserError("--crop and --skip-bad are for --images: the run's own images have theirs.")
    if path is not None and job.target.resolve().is_relative_to(path.resolve()):
        raise UserError(f"the picture '{job.target}' would lie among the images: choose another --out.")
    given = images_for(run, path, checked_crop(crop) if crop else None, skip_bad, show)
    say(given.origin["notes"])
    return given.some(count, run.seed)


def say(notes: Sequence[str]) -> None:
    """What a person should know, beside the result."""
    for note in notes:
        print(note, file=sys.stderr)


def likeness_words(numbers: dict[str, float]) -> str:
    """MSE, PSNR and SSIM in a line."""
    return "  ".join(
        f"{words} {numbers[name]:.4g}"
        for name, words in (("mse", "MSE in [-1, 1]"), ("mse_unit", "in [0, 1]"), ("psnr", "PSNR"), ("ssim", "SSIM"))
        if name in numbers
    )


def listed(option: str, text: str) -> list[str]:
    """Words joined by commas, each once."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError(f"{option} is empty.")
    return list(dict.fromkeys(words))


def metric_words(name: str) -> str:
    """A metric's name for people."""
    known = {"fid": "FID", "frechet_own_network": "Fréchet (own network)", "is": "IS", "kid": "KID"}
    return known.get(name, name)


def feature_network(path: Path | None, device: Any, trust: bool) -> Any:
    """FID's network, from --inception or from the cache."""
    from dualmcmc.metrics.features import load_features

    return load_features(path, device, trust)


def network_facts(features: Any) -> dict[str, Any] | None:
    """Which feature network it was, for the record."""
    return None if features is None else {"sha256": features.checksum, "standard": features.standard}
