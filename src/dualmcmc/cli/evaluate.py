"""Commands that measure a run and check its health: evaluate, fid, doctor, report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualmcmc.cli.data import Crop, SkipBad, check_choice
from dualmcmc.cli.networks import Networks, import_networks
from dualmcmc.cli.options import (
    Device,
    Ema,
    Inception,
    Json,
    RunFolderTarget,
    RunTask,
    Seed,
    TrustInception,
    import_torch,
    limit,
    number,
    print_json,
    print_notes,
    progress_of,
    run_command,
    show,
    split_list,
    waiting,
)
from dualmcmc.cli.tasks import format_similarity
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import check_output, expand_user

if TYPE_CHECKING:
    from dualmcmc.data import DataSplits
    from dualmcmc.tasks.evaluate import Evaluation
    from dualmcmc.tasks.run import Run

SAMPLES = 50_000  # as in published results
METRIC_LABELS = {"fid": "FID", "frechet_custom_network": "Fréchet (custom network)", "is": "IS", "kid": "KID"}


@run_command()
def evaluate(
    task: RunTask,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="fid, is, kid, precision, recall, mse, psnr, ssim; comma-separated. [default: fid,is,mse,psnr,ssim, "
            "those that need Inception only if it was fetched]",
            show_default=False,
        ),
    ] = None,
    num: Annotated[
        int | None,
        limit(
            "Number of samples of each kind, and the maximum number of images to reconstruct, chosen by --seed. "
            "[default: 50000, and all; on a CPU, about a minute's worth]",
            2,
        ),
    ] = None,
    inception: Inception = None,
    trust_inception: TrustInception = False,
) -> None:
    """Measure FID of samples and errors of reconstructions.

    FID of generator and EBM samples uses the 2015 TensorFlow Inception ('dualmcmc data fetch inception'), samples
    rounded to uint8, and all training images, whose statistics are cached; those of CIFAR-10 are included.
    Reconstructions are of held-out images: by inference alone, with the z-chain, and by chains from noise. The result
    is saved in TARGET/results and shown by 'dualmcmc report'.

    \b
    Examples:
      dualmcmc evaluate runs/c10
      dualmcmc evaluate runs/c10 sampling.steps=70 sampling.step_size=0.08 sampling.temperature=6.25e-6
      dualmcmc evaluate runs/c10 --metrics fid,kid -n 10000
      torchrun --nproc_per_node=8 -m dualmcmc evaluate runs/c10
    """
    from dualmcmc.metrics.quality import missing_torchmetrics
    from dualmcmc.tasks import evaluate as module
    from dualmcmc.tasks.fid import load_features, small_sample_notes

    with task.distributed() as world:
        with world.fail_together():
            given = split_list("--metrics", metrics.lower()) if metrics is not None else list(module.DEFAULT)
            wanted = module.check_metrics(given)
            run = task.load(world)
            if set(wanted) <= {"is", "kid"} and (text := missing_torchmetrics()):
                raise UserError(f"{text}.")
            features, missing = None, {}
            if set(wanted) & set(module.SAMPLE_METRICS):
                try:
                    with waiting("loading Inception"):
                        features = load_features(inception, run.device, trust_inception)
                except UserError as error:
                    if metrics is not None or inception is not None:
                        raise
                    missing = {name: str(error) for name in wanted if name in module.SAMPLE_METRICS}
                    wanted = [name for name in wanted if name not in missing]
        without_inception = world.all_gather(bool(missing))
        with world.fail_together():
            if any(without_inception) and not all(without_inception):
                raise UserError("Inception is missing on some machines: fetch it there, or choose other --metrics.")
        images = None
        if module.needs_images(run, wanted, features):
            with world.fail_together():
                images = run.load_data(progress_of(world))
        samples, reconstructions, notes = _amounts(run, wanted, num, images)
        if world.is_main:
            print_notes(notes)
        result = module.evaluate(run, wanted, samples, images, features, progress_of(world), reconstructions)
    if not world.is_main:
        return
    print_notes(result.data["notes"])
    skipped = missing | result.skipped
    notes = small_sample_notes(min(samples, result.reference["images"])) if result.reference else []
    print_notes(notes)
    task.finish(
        run,
        result.numbers(),
        _format_evaluation(result, samples, run, skipped),
        samples=samples if result.generator or result.ebm else 0,
        reference=result.reference,
        reconstructed=result.reconstructed,
        data=result.data,
        inception=_network_facts(features),
        skipped=skipped,
        notes=notes,
        seconds_by_part={name: round(value, 3) for name, value in result.seconds.items()},
    )


def _amounts(
    run: Run, metrics: list[str], num: int | None, images: DataSplits | None
) -> tuple[int, int | None, list[str]]:
    """How many samples and reconstructions, and a note if they are fewer than usual."""
    from dualmcmc.tasks.evaluate import SAMPLE_METRICS, steps_per_sample
    from dualmcmc.tasks.reconstruct import comparison_steps
    from dualmcmc.tasks.work import default_count, reduction_note

    if num is not None:
        return num, num, []
    parts = []
    # twice the work: samples and reconstructions share the time
    samples = default_count(run, SAMPLES, 2 * steps_per_sample(run))
    if set(metrics) & set(SAMPLE_METRICS):
        parts.append((samples, SAMPLES, "samples"))
    reconstructions = None
    if images is not None and set(metrics) - set(SAMPLE_METRICS):
        store, kind = images.test_or_train()
        steps = comparison_steps(run) + comparison_steps(run, from_noise=False)
        reconstructions = default_count(run, len(store), 2 * steps)
        parts.append((reconstructions, len(store), kind))
    return samples, reconstructions, reduction_note(*parts)


def _format_evaluation(result: Evaluation, samples: int, run: Run, skipped: dict[str, str]) -> list[str]:
    lines = []
    kinds = {"generator": result.generator, "EBM": result.ebm}
    measured = {kind: numbers for kind, numbers in kinds.items() if numbers}
    if measured and result.reference:
        chain, what = run.config.sampling_chain, result.data
        x_chain = f"   x-chain: {chain.steps} steps of {chain.step_size:g}" if result.ebm else ""
        lines += [
            f"{samples:,} samples of each kind against {result.reference['images']:,} training images "
            f"({what['source']} {what['split']}, {what['size']}x{what['size']}, crop {what['crop']})",
            " ".join([f"{'':<24}", *(f"{kind:>12}" for kind in measured)]) + x_chain,
        ]
        for name in next(iter(measured.values())):
            if not name.endswith("_std"):
                values = (_with_std(part, name) for part in measured.values())
                lines.append(f"{METRIC_LABELS.get(name, name):<24} " + " ".join(f"{value:>12}" for value in values))
    found = (result.reconstruction, result.train_reconstruction)
    for (kind, count), by_start in zip(result.reconstructed.items(), found, strict=False):
        lines.append(f"reconstructions of {count:,} {kind}")
        lines += [f"{start:<24} {format_similarity(numbers)}" for start, numbers in by_start.items()]
    by_reason: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return lines + [f"skipped {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def _with_std(numbers: dict[str, float], name: str) -> str:
    std = f" ±{numbers[f'{name}_std']:.2g}" if f"{name}_std" in numbers else ""
    return f"{numbers[name]:.4g}{std}"


def _network_facts(features: Any) -> dict[str, Any] | None:
    if features is None:
        return None
    return {
        "sha256": features.checksum,
        "standard": features.standard,
        "precision": features.precision,
        "corrected": features.exact is not None,  # moments, by float32 features of some images
    }


def fid(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Dataset NAME (training split), NAME:SPLIT, NAME=PATH, a PATH, or FILE.npz:ARRAY.",
            show_default=False,
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.", show_default=False)],
    size: Annotated[
        int | None,
        number("--size", help="Image side in pixels. [default: the dataset's]", low=1, high=4096, show_default=False),
    ] = None,
    crop: Crop = "center",
    skip_bad: SkipBad = False,
    inception: Inception = None,
    trust_inception: TrustInception = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure FID between two sets of images.

    \b
    Examples:
      dualmcmc fid cifar10:train cifar10:test
      dualmcmc fid my/samples cifar10 --size 32
    """
    import_torch()
    from dualmcmc.tasks import record
    from dualmcmc.tasks.fid import distance, load_features
    from dualmcmc.utils.device import resolve_device
    from dualmcmc.utils.progress import show_progress

    start = time.monotonic()
    with waiting("loading Inception"):
        features = load_features(inception, resolve_device(device), trust_inception)
    name, value, sets = distance(first, second, features, size, check_choice("--crop", crop), skip_bad, show_progress)
    if as_json:
        facts = record.describe_call("fid", time.monotonic() - start, features.device)
        print_json({name: value, "sets": sets, "inception": _network_facts(features), **facts})
        return
    for one in sets:
        size_text = f"{one['size']}x{one['size']}"
        show(f"{one['source']} {one['split']}: {one['images']:,} images, {size_text}, crop {one['crop']}")
        print_notes(one["notes"])
    show(f"{METRIC_LABELS.get(name, name)} {value:.4f}")


def doctor(
    target: RunFolderTarget,
    out: Annotated[
        Path | None, typer.Option(help="FILE.png: curves of the log with healthy ranges.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether a run looks healthy, and what to change.

    Reads only the log, so the run may be training, stopped, killed or diverged. Exit codes: 0 healthy or warnings,
    1 unhealthy, 2 bad input.
    """
    from dualmcmc.report.doctor import doctor as diagnose

    if out is not None:
        from dualmcmc.utils.plots import check_plots

        check_plots()
        check_output(out, ".png")
    diagnosis = diagnose(target)
    if out is not None:
        diagnosis.curves().save(out)
    if as_json:
        facts = {"run": str(expand_user(target)), "verdict": diagnosis.verdict, "images": diagnosis.images}
        facts["lines"] = len(diagnosis.history.lines)
        findings = [vars(finding) for finding in diagnosis.findings]
        print_json({**facts, "findings": findings, "file": None if out is None else str(out)})
    else:
        show(str(diagnosis))
        if out is not None:
            show(f"picture: {out}")
    if diagnosis.verdict == "unhealthy":
        raise typer.Exit(1)


def report(
    target: RunFolderTarget,
    out: Annotated[
        Path | None, typer.Option(help="FILE.html. [default: report.html in TARGET]", show_default=False)
    ] = None,
    seed: Seed = 0,
    ema: Ema = True,
    networks: Networks = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML page about a run.

    Numbers, samples, both chains as film strips, curves, timings and settings.
    """
    import_torch()
    from dualmcmc.engine.run_folder import RunFolder
    from dualmcmc.report.page import LABELS, write_report
    from dualmcmc.utils.plots import check_plots
    from dualmcmc.utils.progress import show_progress

    check_plots()
    folder = RunFolder(expand_user(target))
    folder.require_run()
    check_output(folder.report if out is None else out, ".html")
    path, numbers = write_report(folder.root, device, out, ema, seed, show_progress, networks=import_networks(networks))
    if as_json:
        print_json({"file": str(path), "seed": seed, "ema": ema, **numbers})
        return
    for key, label in LABELS.items():
        if key in numbers:
            show(f"{numbers[key]:8.4f}  {label}")
    show(f"measured on {numbers['measured_on']}" + (f", {numbers['samples']} samples" if "samples" in numbers else ""))
    show(f"report: {path}")


COMMANDS = (evaluate, fid, doctor, report)
