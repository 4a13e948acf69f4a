"""The report on a run: freshly measured metrics, recorded results, samples, both chains, curves, settings."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualmcmc import __version__, config_io
from dualmcmc.data import DataSplits, describe
from dualmcmc.data.store import ImageStore
from dualmcmc.engine.log import read_log
from dualmcmc.engine.run_folder import RunFolder
from dualmcmc.health.history import parse_number
from dualmcmc.metrics.fid import pixel_frechet_distance
from dualmcmc.nets import parameter_counts
from dualmcmc.nets.custom import Networks
from dualmcmc.report.curves import plot_log
from dualmcmc.tasks import results
from dualmcmc.tasks.chains import ChainFilm, trace_x, trace_z
from dualmcmc.tasks.inputs import batches, choose
from dualmcmc.tasks.load import load
from dualmcmc.tasks.reconstruct import Similarity, steps_per_image
from dualmcmc.tasks.run import Run, require_finite
from dualmcmc.tasks.work import default_count, step_progress
from dualmcmc.utils.device import set_num_threads
from dualmcmc.utils.errors import UserError, printable, sanitize
from dualmcmc.utils.files import expand_user, write_text
from dualmcmc.utils.images import before_and_after, encode_png, to_uint8
from dualmcmc.utils.progress import ProgressFactory, no_progress, show_progress

LABELS = {
    "fd_pixels_generator": "Fréchet distance (pixels) to held-out images: generator samples",
    "fd_pixels_revised": "Fréchet distance (pixels) to held-out images: EBM-revised samples",
    "fd_pixels_real": "… real training images, for comparison",
    "mse_inference": "reconstruction MSE in [−1, 1]: inference alone",
    "mse_revised": "reconstruction MSE in [−1, 1]: after the noise-free z-chain",
}
TASK_TITLES = {
    "evaluate": "Evaluation",
    "reconstruct": "Reconstruction",
    "inpaint": "Inpainting",
    "outliers": "Outliers",
    "revise": "MCMC revision",
    "interpolate": "Interpolation",
    "sample": "Sampling",
    "long-chains": "Long chains",
}
TASKS_BY_CHAIN = {  # that always use it; see `_uses_chain`
    "x": ("inpaint", "revise", "sample", "long-chains"),
    "z": ("reconstruct", "inpaint", "revise", "interpolate"),
}
PROVENANCE = {"seed": "seed", "commit": "commit", "device": "on", "torch": "torch", "seconds": "seconds"}
MAX_RESULTS = 20  # per task, the newest
MAX_DEPTH = 8  # of nested results: no task exceeds it, but a file may contain anything
MAX_PIXELS = 1024  # values per image: a larger pixel covariance says little and costs much
MAX_IMAGES = 10_000  # for the Fréchet distances and the reconstruction errors
PREVIEW_COUNT, PREVIEW_COLUMNS, FILM_ROWS = 64, 8, 6

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the browser runs no script on this page
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:1100px;margin:2rem auto;padding:0 1rem;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #e5e7eb;padding-bottom:.2rem}
table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #f3f4f6}
td.n{font-variant-numeric:tabular-nums;text-align:right}img{max-width:100%;height:auto}
figure{margin:1rem 0}figcaption{color:#6b7280;font-size:.9rem}
pre{background:#f9fafb;padding:1rem;overflow-x:auto;font-size:12.5px}
"""


def write_report(
    run_folder: str | Path,
    device: str = "auto",
    out: Path | None = None,
    ema: bool = True,
    seed: int = 0,
    progress: ProgressFactory = show_progress,
    *,
    networks: Networks | None = None,
    data: Any = None,
    test_data: Any = None,
) -> tuple[Path, dict[str, Any]]:
    """Measure a run and write its page: the path, and the metrics on it.

    If the run's data are not available, the page omits what needs them. `networks`, `data`, `test_data`: as in `load`.
    """
    folder = RunFolder(expand_user(run_folder))
    folder.require_run()
    run = load(folder.root, device, ema, seed, networks=networks, data=data, test_data=test_data)
    log = read_log(folder.log)
    set_num_threads(run.config.engine.threads)
    images: DataSplits | None = None
    numbers: dict[str, Any] = {}
    try:
        images = run.load_data()
    except UserError as error:
        numbers["measured_on"] = f"no images: {error}"
        logged = [entry["data"] for entry in log if isinstance(entry.get("data"), dict)]
        if logged:
            numbers["data"] = logged[-1]
    if images is not None:
        numbers |= summarize(run, images, progress)
    page = _page(folder, run, log, images, numbers)
    path = out or folder.report
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))  # JSON may contain lone surrogates
    return path, numbers


def summarize(run: Run, images: DataSplits, progress: ProgressFactory = no_progress) -> dict[str, Any]:
    """Fréchet distances to held-out images in pixel space, and reconstruction errors.

    As many samples as real training images are used, so that their distances are comparable. A run without held-out
    images is measured on its training images, and `measured_on` says so. On a CPU fewer images are used, see
    `tasks.work.default_count`.
    """
    store, kind = images.test_or_train()
    if run.config.data.is_image:
        store = choose(store, default_count(run, min(len(store), MAX_IMAGES), steps_per_image(run)), run.seed)
    numbers: dict[str, Any] = {"measured_on": f"{len(store)} {kind}", "data": describe(run.config.data, images)}
    if run.config.data.is_image and kind == "held-out images":
        numbers |= _pixel_distances(run, images.train, store.tensor(), progress)
    if run.has("generator"):
        numbers |= _reconstruction_errors(run, store, progress)
    return numbers


def _pixel_distances(run: Run, train: ImageStore, test: Tensor, progress: ProgressFactory) -> dict[str, Any]:
    """Fréchet distances in pixel space from held-out images; none if there are too few, or too many pixels."""
    steps, values = run.config.sampling_chain.steps, test[0].numel()
    n = default_count(run, min(len(train), MAX_IMAGES), steps + 1)
    if values > MAX_PIXELS or min(len(test), n) <= values:  # the bias would dominate
        return {}
    numbers: dict[str, Any] = {"samples": n}
    start = run.initial_images(n)
    if run.has("generator"):
        numbers["fd_pixels_generator"] = pixel_frechet_distance(to_uint8(start), test)
    if run.has("energy"):
        with step_progress(run, progress, "x-chain", n, max(1, steps), run.world):
            revised = require_finite(run.revise_x(start))
        numbers["fd_pixels_revised"] = pixel_frechet_distance(to_uint8(revised), test)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    numbers["fd_pixels_real"] = pixel_frechet_distance(train.take(order[:n]), test)
    return numbers


def _reconstruction_errors(run: Run, store: ImageStore, progress: ProgressFactory) -> dict[str, Any]:
    """MSE of inference, if there is an inference model, and after the noise-free z-chain."""
    lengths = {"mse_inference": 0} if run.has("inference") else {}
    lengths["mse_revised"] = run.config.teaching.z_chain.steps
    similarity = {name: Similarity(run.config.data.is_image) for name in lengths}
    run.prepare(len(store), progress, z_chain=True)
    for indices, x in batches(run, store, progress, "reconstructing", steps_per_image(run)):
        rng = run.generator_for("z-chain", int(indices[0]))
        for name, steps in lengths.items():
            similarity[name].add(x, run.reconstruct(x, steps, rng))
    errors: dict[str, Any] = {name: one.numbers()["mse"] for name, one in similarity.items()}
    return errors | {"z_steps": lengths["mse_revised"]}


def _page(
    folder: RunFolder, run: Run, log: list[dict[str, Any]], images: DataSplits | None, numbers: dict[str, Any]
) -> str:
    name = _escape(folder.root.resolve().name)
    sections = [
        f"<h1>{name}</h1><p>{_escape(run.config.description)}</p>",
        _metrics_section(numbers),
        results_section(results.read_all(results.folder_for(folder.root))),
        *(_picture_sections(run, images) if run.config.data.is_image else ()),
        "<h2>Curves</h2>" + _figure(plot_log(log), "Means over each log interval."),
        "<h2>Timings and sizes</h2>" + _table(_timings(log, run)),
        f"<h2>Settings</h2><pre>{_escape(config_io.render(run.config))}</pre>",
        f"<p><small>dualmcmc {__version__}</small></p>",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{name}: dualmcmc</title><style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _metrics_section(numbers: dict[str, Any]) -> str:
    rows = [(label, f"{numbers[key]:.4g}") for key, label in LABELS.items() if key in numbers]
    samples = f", with {numbers['samples']:,} samples" if "samples" in numbers else ""
    text = f"Measured on {numbers['measured_on']}{samples}.{_format_data(numbers.get('data'))}"
    return f"<h2>Metrics</h2>{_table(rows)}<p>{_escape(text)}</p>"


def _format_data(described: dict[str, Any] | None) -> str:
    """The training images and how they were prepared: crop and resize change every metric."""
    if described is None:
        return ""
    shape = described.get("shape")
    if isinstance(shape, list):
        text = sanitize("x".join(map(str, shape)))
        return f" Trained on {sanitize(str(described.get('images')))} samples of shape {text}."
    names = ("source", "split", "images", "size", "crop", "resize", "checksum")
    d = {name: sanitize(str(described.get(name))) for name in names}  # may come from an untrusted log
    if type(described.get("images")) is int and len(d["images"]) < 20:
        d["images"] = f"{described['images']:,}"
    return (
        f" Trained on {d['source']} ({d['split']}, {d['images']} images, "
        f"{d['size']}x{d['size']}, crop {d['crop']}, resize {d['resize']}, checksum {d['checksum']})."
    )


def results_section(entries: list[dict[str, Any]]) -> str:
    """A table of recorded results per task, the newest first; empty if there are none."""
    tables = []
    for task, title in TASK_TITLES.items():
        rows = [_result_row(entry) for entry in entries if entry["task"] == task][-MAX_RESULTS:]
        if rows:
            head = "<tr><th>result</th><th>details</th></tr>"
            tables.append(f"<h3>{title}</h3><table>{head}{''.join(reversed(rows))}</table>")
    return f"<h2>Recorded results</h2>{''.join(tables)}" if tables else ""


def _result_row(entry: dict[str, Any]) -> str:
    """One recorded result as HTML. Nothing in the entry is trusted."""
    values = "<br>".join(f"{_escape(name)} <b>{_escape(value)}</b>" for name, value in _flatten(entry["numbers"]))
    skipped = entry.get("skipped")
    for name, reason in skipped.items() if isinstance(skipped, dict) else ():
        values += f"<br><small>{_escape(name)} skipped: {_escape(reason)}</small>"
    details = [f"<code>{_escape(entry.get('command'))}</code>", _escape(entry["time"])]
    details += [f"{_escape(entry[key])} {key}" for key in ("samples", "images") if type(entry.get(key)) is int]
    for chain in TASKS_BY_CHAIN:
        settings = entry.get(f"{chain}_chain")
        if _uses_chain(entry, chain) and isinstance(settings, dict):
            steps = f"{settings.get('steps')} steps of size {settings.get('step_size')}"
            details.append(_escape(f"{chain}-chain: {steps}"))
    details += [f"{label} {_escape(entry[key])}" for key, label in PROVENANCE.items() if entry.get(key) is not None]
    described = entry.get("data")
    if isinstance(described, dict):
        details.append(f"data {_escape(described.get('source'))} {_escape(described.get('checksum'))}")
    return f"<tr><td>{values}</td><td><small>{'<br>'.join(details)}</small></td></tr>"


def _uses_chain(entry: dict[str, Any], chain: str) -> bool:
    """Whether a recorded result depends on the x- or z-chain; for some tasks that depends on what was measured."""
    task, numbers = entry["task"], entry["numbers"]
    if task == "evaluate":
        return bool(numbers.get("ebm" if chain == "x" else "reconstruction"))
    if task == "outliers":
        return chain == "z" and any(
            "reconstruction" in scores for scores in numbers.values() if isinstance(scores, dict)
        )
    return task in TASKS_BY_CHAIN[chain]


def _flatten(numbers: dict[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested numbers as (name, value); a list by its first and last value."""
    for key, value in numbers.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and depth < MAX_DEPTH:
            yield from _flatten(value, f"{name} ", depth + 1)
        elif isinstance(value, list):
            if value:
                yield name, f"{_format_number(value[0])} to {_format_number(value[-1])}"
        else:
            yield name, _format_number(value)


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _picture_sections(run: Run, images: DataSplits | None) -> list[str]:
    return [
        _samples_section(run),
        _x_section(run) if run.has("energy") else "",
        _z_section(run, images) if images is not None and run.has("generator") else "",
    ]


def _samples_section(run: Run) -> str:
    start = run.initial_images(PREVIEW_COUNT)
    before = to_uint8(start).cpu() if run.has("generator") else None
    after = to_uint8(run.revise_x(start)).cpu() if run.has("energy") else None
    picture = before_and_after(before, after, PREVIEW_COLUMNS, run.config.sampling_chain.format_steps())
    both = before is not None and after is not None
    caption = "Generator samples, and the same samples revised by the x-chain." if both else "Samples."
    return "<h2>Samples</h2>" + _figure(picture, caption)


def _x_section(run: Run) -> str:
    start = "Generator samples" if run.has("generator") else "Noise"
    caption = f"{start}, revised by Langevin steps on the energy."
    return "<h2>MCMC revision on x</h2>" + _film(trace_x(run), caption, "energy")


def _z_section(run: Run, images: DataSplits) -> str:
    store, kind = images.test_or_train()
    start = "Inference alone" if run.has("inference") else "Prior draws"
    caption = f"{start}, revised by Langevin steps on the posterior of {kind}."
    return "<h2>MCMC revision on z</h2>" + _film(trace_z(run, store.first(PREVIEW_COUNT)), caption, "MSE")


def _film(film: ChainFilm, caption: str, value: str) -> str:
    means = film.means()
    ends = f"Mean {value} {means[0]:.4g} at the start, {means[-1]:.4g} at the end."
    return _figure(film.strip(FILM_ROWS), caption) + _figure(film.profile(), ends)


def _timings(log: list[dict[str, Any]], run: Run) -> list[tuple[str, str]]:
    rows = [(f"parameters of the {net} network", f"{count:,}") for net, count in parameter_counts(run.trio).items()]
    rows.append(("images trained on", f"{run.images:,}"))
    sessions = [entry for entry in log if entry.get("kind") in ("start", "resume")]
    if sessions:
        device, version = (sanitize(str(sessions[-1].get(key))) for key in ("device", "torch"))
        rows += [("device", f"{device}, torch {version}"), ("sessions", str(len(sessions)))]
        init = sessions[0].get("init")
        if isinstance(init, dict):
            file, checksum = (sanitize(str(init.get(key))) for key in ("file", "sha256"))
            rows.append(("started from the weights", f"{file}, SHA-256 {checksum[:16]}"))
    lines = [entry for entry in log if entry.get("kind") == "train"]
    times = [(_plausible(line.get("seconds")), _plausible(line.get("iteration"))) for line in lines]
    valid = [(seconds, iterations) for seconds, iterations in times if seconds is not None and iterations]
    if valid:
        seconds, iterations = valid[-1]
        rows += [
            ("iterations", f"{iterations:,.0f}"),
            ("training time", f"{seconds / 60:.1f} min"),
            ("time per iteration", f"{1000 * seconds / iterations:.1f} ms"),
        ]
    saves = [spent for entry in log if entry.get("kind") == "save" and (spent := _plausible(entry.get("seconds")))]
    if saves:
        rows.append(("time per save", f"{1000 * sum(saves) / len(saves):.0f} ms"))
    return rows


def _plausible(value: Any) -> float | None:
    """A logged number from 0 to 1e15; None for anything else."""
    number = parse_number(value)
    return number if number is not None and 0 <= number < 1e15 else None


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{_escape(a)}</td><td class=n>{_escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"


def _figure(picture: Tensor, caption: str) -> str:
    """A (C, h, w) uint8 picture, embedded in the page."""
    url = f"data:image/png;base64,{base64.b64encode(encode_png(picture)).decode()}"
    return f'<figure><img src="{url}" alt=""><figcaption>{_escape(caption)}</figcaption></figure>'


def _escape(value: Any) -> str:
    return html.escape(printable(str(value)))
