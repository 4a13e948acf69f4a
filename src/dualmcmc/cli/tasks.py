"""Commands that make pictures and numbers from a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dualmcmc.cli.networks import Networks, import_networks
from dualmcmc.cli.options import (
    DEFAULT_NUM,
    Images,
    Json,
    RunTarget,
    RunTask,
    limit,
    number,
    print_json,
    print_notes,
    progress_of,
    run_command,
    show,
    split_list,
)
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.files import check_output
from dualmcmc.utils.progress import show_progress

if TYPE_CHECKING:
    from dualmcmc.tasks.inputs import TaskImages

LONG_CHAIN_STEPS = 2000
MAX_INTERPOLATED = 10_000  # images in the picture
NOISE_FREE = "teaching.z_chain.temperature=0"  # the default of `reconstruct` and `inpaint`


@run_command(".png", ".npz")
def sample(task: RunTask, num: Annotated[int, limit("Number of samples. [default: 64]")] = 64) -> None:
    """Draw generator and EBM samples.

    A .png shows generator samples next to the same samples after the EBM's x-chain; a .npz contains any number of both
    as uint8 pixels.

    \b
    Examples:
      dualmcmc sample cifar10-simple
      dualmcmc sample runs/c10 sampling.steps=70 sampling.step_size=0.08 -n 100
      dualmcmc sample runs/c10 -n 50000 --out samples.npz
      torchrun --nproc_per_node=8 -m dualmcmc sample runs/c10 -n 50000 --out samples.npz
    """
    from dualmcmc.tasks.sample import sample as draw

    with task.distributed() as world:
        with world.fail_together():
            run = task.load(world)
        numbers = draw(run, num, task.out, progress_of(world))
        kinds = [*(["generator"] if run.has("generator") else []), f"after {run.config.sampling_chain.format_steps()}"]
        lines = [f"{num} samples: {', and '.join(kinds if run.has('energy') else kinds[:1])}"]
        if numbers:
            lines.append(
                f"mean energy {numbers['energy_generator']:.4g} -> {numbers['energy_revised']:.4g}, displacement "
                f"{numbers['x_displacement_rms']:.4g} (rms per pixel, range [-1, 1])"
            )
        task.finish(run, numbers, lines, samples=num)


@run_command(".png")
def long_chains(task: RunTask, num: Annotated[int, limit("Number of chains. [default: 16]")] = 16) -> None:
    """Run x-chains far beyond their training length.

    2,000 steps, or sampling.steps; shows energy, displacement and pixel range along the chains, and whether they have
    mixed (R-hat, effective sample size). A chain that has converged keeps its energy; one that keeps drifting indicates
    an energy that is unbounded there. sampling.metropolis=true accepts or rejects each step (MALA).

    \b
    Example:
      dualmcmc long-chains runs/c10 sampling.steps=5000 -n 8
    """
    from dualmcmc.tasks import chains
    from dualmcmc.utils.images import save_png
    from dualmcmc.utils.plots import check_plots

    check_plots()
    run = task.load(defaults=[f"sampling.steps={LONG_CHAIN_STEPS}"])
    result = chains.long_chains(run, num, run.config.sampling_chain.steps, show_progress)
    save_png(result.picture, task.out)
    r = result.numbers
    lines = [
        f"{num} chains of {r['steps']} steps: {'all finite' if r['finite'] else 'NOT FINITE'}",
        f"mean energy {r['energy_start']:.4g} at the start, {r['energy_halfway']:.4g} halfway, "
        f"{r['energy_end']:.4g} at the end",
        *_format_mixing(r),
        f"displacement {r['displacement_rms_halfway']:.4g} halfway, {r['displacement_rms_end']:.4g} at the end "
        "(rms per pixel)",
        f"largest pixel {r['max_abs_pixel']:.4g}, {100 * r['fraction_outside_range']:.2f} % outside [-1, 1]",
    ]
    task.finish(run, r, lines, samples=num)


def _format_mixing(numbers: dict[str, Any]) -> list[str]:
    lines = []
    if numbers["acceptance_rate"] is not None:
        lines.append(f"{100 * numbers['acceptance_rate']:.1f} % of the proposals accepted")
    size, r_hat = numbers["effective_sample_size"], numbers["r_hat"]
    if r_hat is not None and size is not None:
        lines.append(
            f"second half: R-hat of the energy {r_hat:.3f} (mixed: below 1.01), effective sample size {size:.0f}"
        )
    return lines


@run_command(".png")
def reconstruct(
    task: RunTask,
    images: Images = None,
    num: Annotated[int | None, limit(f"Use only this many images, chosen by --seed. {DEFAULT_NUM}")] = None,
) -> None:
    """Reconstruct images, with and without the z-chain.

    The z-chain is noise-free, which gives smaller errors; teaching.z_chain.temperature=1 samples p(z|x) as in the
    paper.

    \b
    Examples:
      dualmcmc reconstruct runs/c10 teaching.z_chain.steps=30
      dualmcmc reconstruct runs/faces --images photos/ data.crop=celeba140
    """
    from dualmcmc.tasks import reconstruct as module

    run = task.load(defaults=[NOISE_FREE])
    run.require("generator", "'reconstruct'")
    inputs = task.images(run, images, num, module.steps_per_image(run))
    result = module.reconstruct(run, inputs.store, progress=show_progress, temperature=None)
    module.save_picture(result, task.out)
    lines = [
        f"{result.images} {inputs.what}: {', '.join(result.captions())}",
        f"{result.start:<18} {format_similarity(result.inference)}",
        f"{result.start + ' + chain':<18} {format_similarity(result.revised)}",
    ]
    numbers = {"inference": result.inference, "revised": result.revised}
    task.finish(run, numbers, lines, images=result.images, what=inputs.what, data=inputs.origin)


def format_similarity(numbers: dict[str, float]) -> str:
    """MSE, PSNR and SSIM on one line."""
    labels = {"mse": "MSE on [-1, 1]", "mse_0_to_1": "on [0, 1]", "psnr_db": "PSNR", "ssim": "SSIM"}
    return "  ".join(f"{label} {numbers[name]:.4g}" for name, label in labels.items() if name in numbers)


@run_command(".png")
def interpolate(
    task: RunTask,
    images: Images = None,
    num: Annotated[int, limit("Number of pairs of each kind. [default: 3]")] = 3,
    points: Annotated[int, number("--points", help="Images per pair, both ends included.", low=2)] = 9,
    spherical: Annotated[bool, typer.Option("--spherical", help="Interpolate on the sphere, not linearly.")] = False,
) -> None:
    """Interpolate between latents of samples and of images.

    Top: between prior draws. Bottom: between images, after inference + z-chain.
    """
    from dualmcmc.tasks import interpolate as module
    from dualmcmc.utils.images import from_uint8, save_png

    if num < 1 or num * points > MAX_INTERPOLATED:
        raise UserError(f"-n {num}: use 1 to {MAX_INTERPOLATED // points:,} pairs of {points} points.")
    run = task.load()
    run.require("generator", "'interpolate'")
    inputs = task.images(run, images)
    ends = from_uint8(inputs.store.first(2 * num).to(run.device))
    results = {
        "prior": module.interpolate(run, *module.prior_pairs(run, num), points, spherical),
        "inferred": module.interpolate(run, *module.inferred_pairs(run, ends), points, spherical),
    }
    labels = {"prior": "prior draws", "inferred": inputs.what}
    save_png(module.picture({labels[name]: result for name, result in results.items()}), task.out)
    lines = [
        f"{result.numbers['pairs']} pairs of {labels[name]}, {points} images each: from one to the next a pixel "
        f"changes by {result.numbers['pixel_change_rms_mean']:.4g} "
        f"(rms; largest {result.numbers['pixel_change_rms_max']:.4g})"
        for name, result in results.items()
    ]
    numbers = {name: result.numbers for name, result in results.items()}
    task.finish(run, numbers, lines, data=inputs.origin)


@run_command(".png")
def revise(
    task: RunTask,
    images: Images = None,
    num: Annotated[int, limit("Number of chains to average over, at most --batch. [default: 64]")] = 64,
    rows: Annotated[int, number("--rows", help="Chains shown.", low=1, high=100)] = 6,
    every: Annotated[int, number("--every", help="Steps between two frames of the x-chain.", low=1)] = 3,
) -> None:
    """Show both chains step by step, as film strips.

    Left: the x-chain from generator samples, and its energy. Right: the z-chain from inference with the image last, and
    its reconstruction error. 'dualmcmc evaluate' measures FID before and after the x-chain.
    """
    from dualmcmc.tasks import chains
    from dualmcmc.utils.images import save_png
    from dualmcmc.utils.plots import check_plots

    check_plots()
    run = task.load()
    for network in ("energy", "generator"):
        run.require(network, "'revise'")
    inputs = task.images(run, images)
    x = chains.trace_x(run, num, every, show_progress)
    z = chains.trace_z(run, inputs.store.first(num), 1, show_progress)
    save_png(chains.picture(x, z, rows), task.out)
    energy, mse = x.means(), z.means()
    lines = [
        f"{x.caption}: mean energy {energy[0]:.4g} -> {energy[-1]:.4g} ({num} chains)",
        f"{z.caption}: MSE {mse[0]:.4g} -> {mse[-1]:.4g} ({min(num, len(inputs.store))} {inputs.what})",
    ]
    numbers = {"energy": energy, "mse": mse, "frames_x": x.at, "frames_z": z.at}
    task.finish(run, numbers, lines, chains=num, data=inputs.origin)


@run_command(".png")
def inpaint(
    task: RunTask,
    mask: Annotated[
        str,
        typer.Option(
            help="M20, M30, M40: central square of that side at 64 pixels, scaled. R20, R30, R40: that percentage in "
            "random squares. Or an image whose white pixels are hidden."
        ),
    ] = "M20",
    images: Images = None,
    num: Annotated[int | None, limit(f"Use only this many images, chosen by --seed. {DEFAULT_NUM}")] = None,
) -> None:
    """Fill in hidden parts of images.

    In the paper's three stages: inference, + z-chain, + x-chain. Picture columns: image, masked image, the three
    stages. Only observed pixels are used. The z-chain is noise-free, which gives smaller errors;
    teaching.z_chain.temperature=1 samples p(z|observed) as in the paper.
    """
    from dualmcmc.tasks import inpaint as module
    from dualmcmc.utils.images import save_png

    run = task.load(defaults=[NOISE_FREE])
    run.require("generator", "'inpaint'")
    module.make_mask(mask, 1, run.config.data.size)  # refuse a bad mask before the work starts
    inputs = task.images(run, images, num, module.steps_per_image(run))
    result = module.inpaint(run, inputs.store, mask, progress=show_progress, temperature=None)
    save_png(module.picture(result), task.out)

    def both(numbers: dict[str, float]) -> str:
        return f"{numbers['psnr_db']:.3f} / {numbers['ssim']:.3f}"

    lines = [
        f"{result.images} {inputs.what}, mask {mask} hides {100 * result.hidden_fraction:.1f} % of the pixels",
        f"{'PSNR / SSIM':<32} {'observed kept':>16} {'all generated':>16} {'PSNR, hidden pixels':>20}",
        *(
            f"{label:<32} {both(result.completed[stage]):>16} {both(result.generated[stage]):>16} "
            f"{result.completed[stage]['psnr_hidden_db']:>20.3f}"
            for stage, label in result.labels().items()
        ),
    ]
    numbers = {
        "completed": result.completed,
        "generated": result.generated,
        "hidden_fraction": result.hidden_fraction,
    }
    task.finish(run, numbers, lines, images=result.images, what=inputs.what, data=inputs.origin, mask=mask)


@run_command(".png")
def outliers(
    task: RunTask,
    against: Annotated[
        str,
        typer.Option(
            help="Datasets to detect, comma-separated: NAME ('dualmcmc data list'), NAME:SPLIT, NAME=PATH, or PATH.",
            show_default=False,
        ),
    ],
    scores: Annotated[
        str, typer.Option(help="energy, typicality (|E - mean|), reconstruction; comma-separated.")
    ] = "energy",
    num: Annotated[int | None, limit(f"Use only this many images per dataset, chosen by --seed. {DEFAULT_NUM}")] = None,
) -> None:
    """Detect images of other datasets by their energy.

    AUROC, AUPR, FPR@95 and histograms. The run's held-out images are the in-distribution set; higher scores mean
    outliers.

    \b
    Examples:
      dualmcmc outliers runs/c10 --against svhn,cifar100,celeba
      dualmcmc outliers runs/c10 --against photos/,svhn=/data/svhn --scores energy,typicality
    """
    from dualmcmc.tasks import outliers as module
    from dualmcmc.tasks.inputs import dataset_for, held_out_images, parse_dataset
    from dualmcmc.utils.images import save_png
    from dualmcmc.utils.plots import check_plots

    check_plots()
    chosen = module.check_scores(split_list("--scores", scores))
    names = split_list("--against", against)
    for word in names:  # refuse an unknown one before the run's own images are read
        parse_dataset(word)
    run = task.load()
    steps = module.steps_per_image(run, chosen)
    own = held_out_images(run, show_progress)
    print_notes(own.origin["notes"])
    own = task.subset(run, own, num, steps)
    others: dict[str, TaskImages] = {}
    for word in names:
        name, inputs = dataset_for(run, word, show_progress)
        print_notes(inputs.origin["notes"])
        copy, key = 1, name
        while key in (module.IN_DISTRIBUTION, *others):
            copy += 1
            key = f"{name}-{copy}"
        others[key] = task.subset(run, inputs, num, steps)
    stores = {name: inputs.store for name, inputs in others.items()}
    result = module.outliers(run, own.store, stores, chosen, show_progress)
    save_png(module.picture(result), task.out)
    lines = [
        f"in-distribution: {len(own.store)} {own.what}",
        f"{'against':<24} {'images':>7} {'score':<15} AUROC   AUPR  FPR@95",
        *(
            f"{name:<24} {len(stores[name]):>7} {score:<15} {r['auroc']:.3f}  {r['aupr_outliers']:.3f}   "
            f"{r['fpr_at_95_tpr']:.3f}{module.format_verdict(r['auroc'])}"
            for name, by_score in result.numbers.items()
            for score, r in by_score.items()
        ),
    ]
    task.finish(
        run,
        result.numbers,
        lines,
        images={module.IN_DISTRIBUTION: len(own.store)} | {name: len(store) for name, store in stores.items()},
        what=own.what,
        data=own.origin,
        against={name: inputs.origin for name, inputs in others.items()},
    )


Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.")]


def export(
    target: RunTarget,
    out: Annotated[Path, typer.Option(help="FILE.safetensors.", show_default=False)],
    dtype: Dtype = "float16",
    networks: Networks = None,
    as_json: Json = False,
) -> None:
    """Write a run's networks into one small file.

    The file also contains the settings, but no code and no paths of this machine. Every command that takes a snapshot
    takes it.
    """
    from dualmcmc.tasks.export import check_dtype
    from dualmcmc.tasks.load import load

    check_dtype(dtype)
    check_output(out, ".safetensors")
    if out.exists():
        raise UserError(f"'{out}' already exists: choose another --out.")
    numbers = load(target, "cpu", networks=import_networks(networks)).export(out, dtype)
    if as_json:
        print_json({"file": str(out), **numbers})
        return
    show(f"weights: {out}, {numbers['bytes'] / 1e6:.1f} MB, {dtype}")
    show(f"rounding changed them by {numbers['relative_change']:.2g} (rms, relative)")


def push(
    target: RunTarget,
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as a private one.")] = False,
    branch: Annotated[
        str | None, typer.Option(help="Branch, created if necessary. [default: main]", show_default=False)
    ] = None,
    message: Annotated[
        str | None, typer.Option(help="Commit message. [default: how many images]", show_default=False)
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="Licence in the model card, such as apache-2.0.", show_default=False)
    ] = None,
    replace_card: Annotated[
        bool, typer.Option("--replace-card", help="Write a new model card over that of the repository.")
    ] = False,
    dtype: Dtype = "float16",
    networks: Networks = None,
    as_json: Json = False,
) -> None:
    """Upload a run's networks to the Hugging Face Hub.

    The file is the one that 'export' writes. It comes with a model card, unless the repository has one. Log in with
    'hf auth login', or set HF_TOKEN. Every command that takes a trained run takes hf://USER/NAME.

    \b
    Examples:
      dualmcmc push runs/c10 user/cifar10-ebm
      dualmcmc push runs/c10 user/cifar10-ebm --private --branch longer --message 'Train twice as long'
      dualmcmc sample hf://user/cifar10-ebm
    """
    from dualmcmc import hub
    from dualmcmc.tasks.export import check_dtype
    from dualmcmc.tasks.load import load
    from dualmcmc.utils.extras import require

    check_dtype(dtype)
    hub.parse_repo(repo)
    require("huggingface_hub", "hub", "push")  # before the run is loaded
    run = load(target, "cpu", networks=import_networks(networks))
    made = run.push(repo, dtype, private, branch, message, license, replace_card)
    if as_json:
        print_json(made)
        return
    show(f"weights: {made['name']}, {made['bytes'] / 1e6:.1f} MB, {dtype}, SHA-256 {made['sha256']}")
    kept = "unchanged, since it is not a generated one, so its checksum may be old; --replace-card writes a new one"
    show(f"model card: {'written' if made['card'] else kept}")
    show(f"commit: {made['url']}")


COMMANDS = (sample, long_chains, reconstruct, interpolate, revise, inpaint, outliers, export, push)
