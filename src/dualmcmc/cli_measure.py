"""The commands that measure: they parse, call, print."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualmcmc.cli_data import CROP_NAMES, Json, SkipBad, checked_crop, print_json
from dualmcmc.cli_options import (
    Average,
    Batch,
    Device,
    InceptionFile,
    Job,
    RunPath,
    Seed,
    Steps,
    StepSize,
    Temperature,
    TrustInception,
    ZSteps,
    feature_network,
    likeness_words,
    listed,
    load_run,
    metric_words,
    network_facts,
    say,
    watch_for,
    working_crew,
)
from dualmcmc.errors import UserError

if TYPE_CHECKING:
    from dualmcmc.tasks.run import Run


def evaluate(
    run: RunPath,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="fid, is, kid, precision, recall, mse, psnr, ssim, joined by commas. [default: fid,is,mse,psnr,ssim, "
            "without those that need Inception where it is not here]",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of each kind.", min=2)] = 50_000,
    steps: Steps = None,
    step_size: StepSize = None,
    temperature: Temperature = None,
    z_steps: ZSteps = None,
    inception: InceptionFile = None,
    trust_inception: TrustInception = False,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a run: FID of generator and EBM samples, MSE, PSNR and SSIM of reconstructions.

    FID takes the 2015 TensorFlow Inception, samples rounded to bytes, and all training images; their
    statistics are kept in the cache folder. 'dualmcmc data fetch inception' gets the weights, once.
    Reconstructions are of held-out images: by inference alone, with the z-chain, and by chains from noise.
    The result is kept as JSON in RUN/results and shown by 'dualmcmc report'.

    \b
    Examples:
      dualmcmc evaluate runs/c10                                  50,000 samples, the run's own chain
      dualmcmc evaluate runs/c10 --steps 70 --step-size 0.08 --temperature 6.25e-6   the authors' chain for FID
      dualmcmc evaluate runs/c10 --metrics fid,kid --samples 10000
      torchrun --nproc_per_node=8 -m dualmcmc evaluate runs/c10    eight GPUs share the work
    """
    from dualmcmc import data
    from dualmcmc.tasks import evaluate as task
    from dualmcmc.tasks.distance import few_notes

    with working_crew(device) as crew:
        with crew.alike():
            job = Job(run, "evaluate", None)
            given = listed("--metrics", metrics.lower()) if metrics is not None else list(task.DEFAULT)
            wanted = task.check_metrics(given)
            loaded = load_run(run, device, ema, seed, steps, step_size, temperature, z_steps, batch, crew)
            features, missing = None, {}
            if set(wanted) & set(task.OF_SAMPLES):
                try:
                    features = feature_network(inception, loaded.device, trust_inception)
                except UserError as error:
                    if metrics is not None or inception is not None:
                        raise
                    missing = {name: str(error) for name in wanted if name in task.OF_SAMPLES}
                    wanted = [name for name in wanted if name not in missing]
            own = data.load(loaded.config.data, watch_for(crew))
        lacking = crew.gather(bool(missing))
        with crew.alike():
            if any(lacking) and not all(lacking):
                raise UserError("Inception is not on every machine: fetch it there, or name --metrics without it.")
        what = data.describe(loaded.config.data, own)
        result = task.evaluate(loaded, wanted, samples, own, features, watch_for(crew))
    if not crew.leads:
        return
    say(what["notes"])
    left_out = missing | result.left_out
    notes = few_notes(min(samples, len(own.train))) if result.generator else []
    say(notes)
    job.finish(
        loaded,
        result.numbers(),
        _evaluated(result, samples, own, what, loaded, left_out),
        as_json,
        picture=False,
        samples=samples if result.generator else 0,
        reference={"images": len(own.train), "from_cache": result.reference_cached} if result.generator else None,
        reconstructed=own.held_out()[1] if result.reconstruction else None,
        data=what,
        inception=network_facts(features),
        left_out=left_out,
        notes=notes,
        seconds_of={name: round(value, 3) for name, value in result.seconds.items()},
    )


def _evaluated(
    result: Any, samples: int, own: Any, what: dict[str, Any], run: Run, left_out: dict[str, str]
) -> list[str]:
    lines = []
    if result.generator:
        chain = run.config.sampling_chain
        lines += [
            f"{samples:,} samples of each kind against {len(own.train):,} training images ({what['source']} "
            f"{what['split']}, {what['size']}x{what['size']}, crop {what['crop']})",
            f"{'':<22} {'generator':>12} {'EBM':>12}   x-chain: {chain.steps} steps of {chain.step_size:g}",
        ]
        for name in result.generator:
            if not name.endswith("_std"):
                a, b = (_with_spread(part, name) for part in (result.generator, result.ebm))
                lines.append(f"{metric_words(name):<22} {a:>12} {b:>12}")
    if result.reconstruction:
        store, kind = own.held_out()
        lines.append(f"reconstructions of {len(store):,} {kind}")
        lines += [f"{start:<14} {likeness_words(numbers)}" for start, numbers in result.reconstruction.items()]
    return lines + [f"left out, {', '.join(names)}: {reason}" for reason, names in _by_reason(left_out).items()]


def _by_reason(left_out: dict[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        grouped.setdefault(reason, []).append(name)
    return grouped


def _with_spread(numbers: dict[str, float], name: str) -> str:
    spread = f" ±{numbers[f'{name}_std']:.2g}" if f"{name}_std" in numbers else ""
    return f"{numbers[name]:.4g}{spread}"


def fid(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="NAME (its training images), NAME:SPLIT, NAME=PATH, PATH or FILE.npz:ARRAY.",
            show_default=False,
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.", show_default=False)],
    size: Annotated[
        int | None, typer.Option(help="Side in pixels. [default: a named set's own]", show_default=False, min=1)
    ] = None,
    crop: Annotated[str, typer.Option(help=f"One of {', '.join(CROP_NAMES)}.")] = "center",
    skip_bad: SkipBad = False,
    inception: InceptionFile = None,
    trust_inception: TrustInception = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """FID between two sets of images, such as samples and data, or two splits.

    \b
    Examples:
      dualmcmc fid cifar10:train cifar10:test
      dualmcmc fid my/samples cifar10 --size 32
    """
    from dualmcmc.engine.device import pick
    from dualmcmc.progress import show
    from dualmcmc.tasks import record
    from dualmcmc.tasks.distance import distance

    began = time.monotonic()
    features = feature_network(inception, pick(device), trust_inception)
    name, value, sets = distance(first, second, features, size, checked_crop(crop), skip_bad, show)
    if as_json:
        facts = record.describe_call("fid", time.monotonic() - began, features.device)
        print_json({name: value, "sets": sets, "inception": network_facts(features), **facts})
        return
    for one in sets:
        print(
            f"{one['source']} {one['split']}: {one['images']:,} images, {one['size']}x{one['size']}, crop {one['crop']}"
        )
        say(one["notes"])
    print(f"{metric_words(name)} {value:.4f}")


COMMANDS = (evaluate, fid)
