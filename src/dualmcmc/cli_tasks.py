"""The commands that make something of a trained run, a picture and numbers: they parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualmcmc.cli_data import Json, SkipBad, checked_crop
from dualmcmc.cli_options import (
    Average,
    Batch,
    CropOption,
    Device,
    Images,
    InceptionFile,
    Job,
    Only,
    Picture,
    RunPath,
    Seed,
    Steps,
    StepSize,
    Temperature,
    TrustInception,
    ZSteps,
    feature_network,
    given_images,
    likeness_words,
    listed,
    load_run,
    metric_words,
    network_facts,
    refuse_a_crew,
    say,
    watch_for,
    working_crew,
)
from dualmcmc.crew import is_launched
from dualmcmc.errors import UserError

if TYPE_CHECKING:
    from dualmcmc.tasks.inputs import Given
    from dualmcmc.tasks.run import Run


MOST_IMAGES = 10_000  # in the picture of an interpolation


def sample(
    run: RunPath,
    n: Annotated[int, typer.Option("-n", help="How many.")] = 64,
    steps: Steps = None,
    step_size: StepSize = None,
    temperature: Temperature = None,
    long_run: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Follow chains of this many steps and show their drift.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.png (a picture) or FILE.npz (pixels, any number). [default: sample.png in RUN; with --long-run "
            "a picture, long-run.png]",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw samples, generator and EBM-revised side by side.

    \b
    Examples:
      dualmcmc sample runs/c10 -n 100 --steps 70 --step-size 0.08
      dualmcmc sample runs/c10 -n 50000 --out samples.npz
      dualmcmc sample runs/c10 -n 16 --long-run 2000
      torchrun --nproc_per_node=8 -m dualmcmc sample runs/c10 -n 50000 --out samples.npz    eight GPUs
    """
    if long_run is not None and steps is not None:
        raise UserError("--steps and --long-run are both given: choose one.")
    if long_run is not None:
        if is_launched():
            refuse_a_crew("--long-run")
        job = Job(run, "long-run", out)
        loaded = load_run(run, device, ema, seed, long_run, step_size, temperature, batch=batch)
        _follow(job, loaded, n, long_run, as_json)
        return
    with working_crew(device) as crew:
        with crew.alike():
            job = Job(run, "sample", out, ".png", ".npz")
            loaded = load_run(run, device, ema, seed, steps, step_size, temperature, batch=batch, crew=crew)

            from dualmcmc.tasks import sample as task
        numbers = task.sample(loaded, n, job.target, watch_for(crew))
        lines = [
            f"{n} samples, generator and after {numbers['steps']} steps",
            f"mean energy {numbers['energy_generator']:.4g} -> {numbers['energy_revised']:.4g}, "
            f"moved {numbers['x_moved']:.4g} (rms per pixel, scale [-1, 1])",
        ]
        job.finish(loaded, numbers, lines, as_json, samples=n)


def _follow(job: Job, loaded: Run, n: int, steps: int, as_json: bool) -> None:
    """Chains far beyond their training length."""
    from dualmcmc.pictures import save_png
    from dualmcmc.tasks import sample as task

    result = task.long_run(loaded, n, steps)
    save_png(result.picture, job.target)
    r = result.numbers
    lines = [
        f"{n} chains of {steps} steps: {'all finite' if r['finite'] else 'NOT FINITE'}",
        f"mean energy {r['energy_start']:.4g} at the start, {r['energy_half']:.4g} halfway, {r['energy_end']:.4g} at "
        "the end",
        f"distance from the start {r['moved_half']:.4g} halfway, {r['moved_end']:.4g} at the end (rms per pixel)",
        f"largest pixel {r['largest_pixel']:.4g}, {100 * r['outside_range']:.2f} % outside [-1, 1]",
    ]
    job.finish(loaded, r, lines, as_json, samples=n)


def reconstruct(
    run: RunPath,
    images: Images = None,
    crop: CropOption = None,
    skip_bad: SkipBad = False,
    n: Only = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of the z-chain. [default: the run's]", show_default=False)
    ] = None,
    out: Picture = None,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Reconstruct images, with and without the z-chain.

    The originals, inference alone, and inference + z-chain, side by side, with MSE, PSNR and SSIM.
    """
    from dualmcmc.progress import show
    from dualmcmc.tasks import reconstruct as task

    job = Job(run, "reconstruct", out)
    loaded = load_run(run, device, ema, seed, z_steps=steps, batch=batch)
    given = given_images(loaded, images, crop, skip_bad, job, n)
    result = task.reconstruct(loaded, given.store, watch=show)
    task.save_picture(result, job.target)
    lines = [
        f"{result.images} {given.what}: original, inference, inference + {result.steps} steps",
        f"inference alone    {likeness_words(result.inference)}",
        f"inference + chain  {likeness_words(result.revised)}",
    ]
    numbers = {"inference": result.inference, "revised": result.revised}
    job.finish(loaded, numbers, lines, as_json, images=result.images, what=given.what, data=given.origin)


def interpolate(
    run: RunPath,
    images: Images = None,
    crop: CropOption = None,
    skip_bad: SkipBad = False,
    pairs: Annotated[int, typer.Option(help="Rows of each kind.", min=1)] = 3,
    points: Annotated[int, typer.Option(help="Images in a row, both ends included.", min=2)] = 9,
    spherical: Annotated[bool, typer.Option("--spherical", help="On the sphere, not on a straight line.")] = False,
    z_steps: ZSteps = None,
    out: Picture = None,
    seed: Seed = 0,
    ema: Average = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Walk between latents: of prior draws (top), and of images after inference + z-chain (bottom)."""
    from dualmcmc.pictures import from_uint8, save_png
    from dualmcmc.tasks import interpolate as task

    job = Job(run, "interpolate", out)
    loaded = load_run(run, device, ema, seed, z_steps=z_steps)
    if pairs * points > MOST_IMAGES:
        raise UserError(f"{pairs} pairs of {points} points are more than {MOST_IMAGES:,} images: take fewer.")
    given = given_images(loaded, images, crop, skip_bad, job)
    ends = from_uint8(given.store.first(2 * pairs).to(loaded.device))
    found = {
        "prior": task.interpolate(loaded, *task.prior_pairs(loaded, pairs), points, spherical),
        "inferred": task.interpolate(loaded, *task.inferred_pairs(loaded, ends), points, spherical),
    }
    save_png(task.picture(*found.values()), job.target)
    words = {"prior": "between prior draws", "inferred": f"between {given.what}"}
    lines = [
        f"{words[name]}: {one.numbers['pairs']} ways of {points} images, a step changes a pixel by "
        f"{one.numbers['step_mean']:.4g} (rms; largest {one.numbers['step_largest']:.4g})"
        for name, one in found.items()
    ]
    numbers = {name: one.numbers for name, one in found.items()}
    job.finish(loaded, numbers, lines, as_json, data=given.origin)


def revise(
    run: RunPath,
    images: Images = None,
    crop: CropOption = None,
    skip_bad: SkipBad = False,
    n: Annotated[int, typer.Option("-n", help="Chains that the numbers are means of (at most --batch).", min=1)] = 64,
    rows: Annotated[int, typer.Option(help="Chains shown.", min=1, max=100)] = 6,
    every: Annotated[int, typer.Option(help="Steps between two frames of x.", min=1)] = 3,
    steps: Steps = None,
    step_size: StepSize = None,
    temperature: Temperature = None,
    z_steps: ZSteps = None,
    fid: Annotated[
        bool, typer.Option("--fid", help="Also FID before and after the x-chain (--samples of each).")
    ] = False,
    samples: Annotated[int, typer.Option(help="Samples for --fid.", min=2)] = 50_000,
    inception: InceptionFile = None,
    trust_inception: TrustInception = False,
    out: Picture = None,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Film strips of both chains: x with its energy, z with its error, at every few steps.

    Left: from generator samples along the x-chain. Right: from inference along the z-chain, the image last.
    """
    from dualmcmc.pictures import save_png
    from dualmcmc.progress import show
    from dualmcmc.tasks import revise as task

    job = Job(run, "revise", out)
    loaded = load_run(run, device, ema, seed, steps, step_size, temperature, z_steps, batch)
    given = given_images(loaded, images, crop, skip_bad, job)
    features = feature_network(inception, loaded.device, trust_inception) if fid else None
    x = task.film_x(loaded, n, every)
    z = task.film_z(loaded, given.store.first(n), 1)
    save_png(task.picture(x, z, rows), job.target)
    energy, mse = x.means(), z.means()
    numbers: dict[str, Any] = {"energy": energy, "mse": mse, "frames_x": x.at, "frames_z": z.at}
    lines = [
        f"x-chain, {len(energy) - 1} steps: mean energy {energy[0]:.4g} -> {energy[-1]:.4g} ({n} chains)",
        f"z-chain, {len(mse) - 1} steps: MSE {mse[0]:.4g} -> {mse[-1]:.4g} ({min(n, len(given.store))} {given.what})",
    ]
    reference: dict[str, Any] = {}
    if features is not None:
        from dualmcmc import data
        from dualmcmc.tasks.evaluate import evaluate as measure

        own = data.load(loaded.config.data, show)
        result = measure(loaded, ["fid"], samples, own, features, show)
        reference = {"samples": samples, "reference": data.describe(loaded.config.data, own)}
        (name,) = result.generator
        numbers |= {f"{name}_before": result.generator[name], f"{name}_after": result.ebm[name]}
        lines.append(
            f"{metric_words(name)} {result.generator[name]:.2f} -> {result.ebm[name]:.2f} ({samples:,} samples against "
            f"{len(own.train):,} training images)"
        )
    job.finish(
        loaded,
        numbers,
        lines,
        as_json,
        chains=n,
        data=given.origin,
        inception=network_facts(features),
        **reference,
    )


def inpaint(
    run: RunPath,
    mask: Annotated[
        str,
        typer.Option(
            help="What is hidden. M20, M30, M40: a centre block (of 64; scaled to other sizes). R20, R30, R40: blocks "
            "at random, that many percent. Or a picture, whose white hides."
        ),
    ] = "M20",
    images: Images = None,
    crop: CropOption = None,
    skip_bad: SkipBad = False,
    n: Only = None,
    steps: Steps = None,
    step_size: StepSize = None,
    temperature: Temperature = None,
    z_steps: ZSteps = None,
    out: Picture = None,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Hide a part of each image and fill it in, in three stages.

    Inference + generator; + z-chain; + x-chain. Columns of the picture: image, occluded, the three stages.
    Of what was there only the observed pixels are used, and in the pictures they stay as they are.
    """
    from dualmcmc.pictures import save_png
    from dualmcmc.progress import show
    from dualmcmc.tasks import inpaint as task
    from dualmcmc.tasks.masks import observed

    job = Job(run, "inpaint", out)
    loaded = load_run(run, device, ema, seed, steps, step_size, temperature, z_steps, batch)
    observed(mask, 1, loaded.config.data.size)  # a bad one is refused before the work begins
    given = given_images(loaded, images, crop, skip_bad, job, n)
    result = task.inpaint(loaded, given.store, mask, watch=show)
    save_png(task.picture(result), job.target)
    stages = {"inference": "inference + generator", "z_chain": "+ z-chain", "x_chain": "+ x-chain"}
    lines = [
        f"{result.images} {given.what}, mask {mask} hides {100 * result.hidden:.1f} % of the pixels",
        f"{'PSNR / SSIM':<24} {'observed kept':>16} {'all generated':>16} {'hidden pixels alone':>20}",
        *(
            f"{words:<24} {_both(result.completed[stage]):>16} {_both(result.generated[stage]):>16} "
            f"{result.completed[stage]['psnr_hidden']:>20.3f}"
            for stage, words in stages.items()
        ),
    ]
    numbers = {"completed": result.completed, "generated": result.generated, "hidden": result.hidden}
    job.finish(loaded, numbers, lines, as_json, images=result.images, what=given.what, data=given.origin, mask=mask)


def _both(numbers: dict[str, float]) -> str:
    return f"{numbers['psnr']:.3f} / {numbers['ssim']:.3f}"


def outliers(
    run: RunPath,
    against: Annotated[
        str,
        typer.Option(
            help="Sets to tell apart from the run's own, joined by commas: names ('dualmcmc data list'), NAME:SPLIT, "
            "NAME=PATH, or paths.",
            show_default=False,
        ),
    ],
    scores: Annotated[
        str, typer.Option(help="energy, typicality (|E - mean|), reconstruction; several joined by commas.")
    ] = "energy",
    crop: CropOption = None,
    skip_bad: SkipBad = False,
    n: Annotated[
        int | None, typer.Option("-n", help="Only so many images of each set, chosen by --seed.", show_default=False)
    ] = None,
    z_steps: ZSteps = None,
    out: Picture = None,
    seed: Seed = 0,
    ema: Average = True,
    batch: Batch = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell images of other sets from the run's held-out ones, by their energy.

    AUROC, AUPR and FPR@95 for each set, and histograms of the scores; higher scores mean outliers.

    \b
    Examples:
      dualmcmc outliers runs/c10 --against svhn,cifar100,celeba
      dualmcmc outliers runs/c10 --against photos/,svhn=/data/svhn --scores energy,typicality
    """
    from dualmcmc.pictures import save_png
    from dualmcmc.progress import show
    from dualmcmc.tasks import outliers as task
    from dualmcmc.tasks.inputs import set_for

    job = Job(run, "outliers", out)
    chosen = task.check_scores(listed("--scores", scores))
    words = listed("--against", against)
    loaded = load_run(run, device, ema, seed, z_steps=z_steps, batch=batch)
    known = given_images(loaded, None, None, False, job, n)
    sets: dict[str, Given] = {}
    for word in words:
        name, given = set_for(loaded, word, checked_crop(crop) if crop else None, skip_bad, show)
        say(given.origin["notes"])
        number, key = 1, name
        while key in (task.KNOWN, *sets):
            number += 1
            key = f"{name}-{number}"
        sets[key] = given.some(n, seed)
    stores = {name: given.store for name, given in sets.items()}
    result = task.outliers(loaded, known.store, stores, chosen, show)
    save_png(task.picture(result), job.target)
    lines = [
        f"known: {len(known.store)} {known.what}",
        f"{'against':<24} {'images':>7} {'score':<15} AUROC   AUPR  FPR@95",
    ]
    for name, by_score in result.numbers.items():
        for score, r in by_score.items():
            lines.append(
                f"{name:<24} {len(stores[name]):>7} {score:<15} {r['auroc']:.3f}  {r['aupr_outliers']:.3f}   "
                f"{r['fpr95']:.3f}"
            )
    job.finish(
        loaded,
        result.numbers,
        lines,
        as_json,
        images={"known": len(known.store)} | {name: len(store) for name, store in stores.items()},
        what=known.what,
        data=known.origin,
        against={name: given.origin for name, given in sets.items()},
    )


COMMANDS = (sample, reconstruct, interpolate, revise, inpaint, outliers)
