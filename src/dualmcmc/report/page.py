"""The page itself: plain HTML with its pictures inside."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from dualmcmc import __version__, data, settings
from dualmcmc.engine import journal
from dualmcmc.engine.folder import RunFolder
from dualmcmc.errors import UserError
from dualmcmc.files import write_text
from dualmcmc.nets import parameter_counts
from dualmcmc.pictures import before_and_after
from dualmcmc.report import figures
from dualmcmc.report.history import number
from dualmcmc.report.measured import measured
from dualmcmc.tasks import record
from dualmcmc.tasks.revise import Film, film_x, film_z
from dualmcmc.tasks.run import Run, load
from dualmcmc.tasks.summary import summarise
from dualmcmc.words import plain

ROWS = 6  # samples in a film strip
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a browser runs no script on this page

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:1100px;margin:2rem auto;padding:0 1rem;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #e5e7eb;padding-bottom:.2rem}
table{border-collapse:collapse}td,th{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #f3f4f6}
td.n{font-variant-numeric:tabular-nums;text-align:right}img{max-width:100%;height:auto}
figure{margin:1rem 0}figcaption{color:#6b7280;font-size:.9rem}
pre{background:#f9fafb;padding:1rem;overflow-x:auto;font-size:12.5px}
.film img{image-rendering:pixelated}
"""

WORDS = {
    "fd_pixels_generator": "Fréchet distance (pixels) to held-out images: generator samples",
    "fd_pixels_revised": "… EBM-revised samples",
    "fd_pixels_real": "… real training images (as good as it gets)",
    "mse_inference": "reconstruction MSE in [−1, 1]: inference alone",
    "mse_revised": "… inference + z-chain",
}


def write_report(
    folder: RunFolder, device: str = "auto", out: Path | None = None, ema: bool = True, seed: int = 0
) -> tuple[Path, dict[str, Any]]:
    """Measure a run, write its page; returns where it is and the numbers on it.

    A run whose data are not here any more gets a page without what needs them.
    """
    run = load(folder.root, device, ema, seed)
    images: data.Images | None = None
    numbers: dict[str, Any] = {}
    try:
        images = data.load(run.config.data)
    except UserError as error:
        numbers["measured_on"] = f"no images: {error}"
        begun = [entry["data"] for entry in journal.read(folder.log) if isinstance(entry.get("data"), dict)]
        if begun:
            numbers["data"] = begun[-1]  # as it was noted when the run began
    if images is not None:
        numbers |= summarise(run, images)
    page = _page(folder, run, images, numbers)
    path = out or folder.report
    write_text(path, page.encode("utf-8", "replace").decode("utf-8"))  # half characters, as JSON can have them
    return path, numbers


def _page(folder: RunFolder, run: Run, images: data.Images | None, numbers: dict[str, Any]) -> str:
    log = journal.read(folder.log)
    start = run.sample(64, steps=0)
    both = before_and_after(start, run.revise_x(start), 8)
    x = film_x(run)
    name = html.escape(folder.root.resolve().name)
    description = html.escape(run.config.description)
    sections = [
        f"<h1>{name}</h1><p>{description}</p>",
        "<h2>Numbers</h2>"
        + _table([(WORDS[key], f"{numbers[key]:.4g}") for key in WORDS if key in numbers])
        + f"<p>Measured on {html.escape(str(numbers['measured_on']))}"
        + (f", with {numbers['samples']:,} samples" if "samples" in numbers else "")
        + f".{html.escape(_data_in_words(numbers))}</p>",
        measured(record.read_all(record.folder_for(folder.root))),
        "<h2>Samples</h2>"
        + _figure(figures.picture(both), "Left: generator. Right: the same, revised by the x-chain.", "film"),
        "<h2>MCMC revision on x</h2>"
        + _film(
            x, f"From generator samples (left) along {run.config.sampling_chain.steps} steps on the energy.", "energy"
        ),
        _z_section(run, images) if images is not None else "",
        "<h2>Curves</h2>" + _figure(figures.curves(log), "Means over each stretch of the log."),
        "<h2>Timings and sizes</h2>" + _table(_timings(log, run)),
        f"<h2>Settings</h2><pre>{html.escape(settings.render(run.config))}</pre>",
        f"<p><small>dualmcmc {__version__}</small></p>",
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{name}: dualmcmc</title><style>{STYLE}</style><body>{''.join(sections)}</body></html>\n"
    )


def _data_in_words(numbers: dict[str, Any]) -> str:
    """What the images are: a crop or a resize changes every number."""
    if "data" not in numbers:
        return ""
    names = ("source", "split", "images", "size", "crop", "resize", "checksum")
    d = {name: plain(str(numbers["data"].get(name))) for name in names}  # of a log that anyone may have written
    if type(numbers["data"].get("images")) is int and len(d["images"]) < 20:
        d["images"] = f"{numbers['data']['images']:,}"
    return (
        f" Trained on {d['source']} ({d['split']}, {d['images']} images, "
        f"{d['size']}x{d['size']}, crop {d['crop']}, resize {d['resize']}, checksum {d['checksum']})."
    )


def _z_section(run: Run, images: data.Images) -> str:
    store, what = images.held_out()
    steps = run.config.teaching.z_chain.steps
    caption = f"From inference alone (left) along {steps} steps on the posterior; rightmost the {what}."
    return "<h2>MCMC revision on z</h2>" + _film(film_z(run, store.first(64)), caption, "MSE")


def _film(film: Film, caption: str, value: str) -> str:
    means = film.means()
    ends = f"Mean {value} {means[0]:.4g} at the start, {means[-1]:.4g} at the end."
    return _figure(figures.picture(film.strip(ROWS)), caption, "film") + _figure(figures.picture(film.profile()), ends)


def _timings(log: list[dict[str, Any]], run: Run) -> list[tuple[str, str]]:
    begun = [entry for entry in log if entry.get("kind") in ("start", "resume")]
    trained = [entry for entry in log if entry.get("kind") == "train"]
    both = [(_sane(entry.get("seconds")), _sane(entry.get("iteration"))) for entry in trained]
    lines = [(seconds, iterations) for seconds, iterations in both if seconds is not None and iterations]
    rows = [(f"parameters of the {net}", f"{count:,}") for net, count in parameter_counts(run.trio).items()]
    rows.append(("images trained on", f"{run.images:,}"))
    if begun:
        device, torch = plain(str(begun[-1].get("device"))), plain(str(begun[-1].get("torch")))
        rows.append(("device", f"{device}, torch {torch}"))
        rows.append(("sittings", str(len(begun))))
    if lines:
        seconds, iterations = lines[-1]
        rows += [
            ("iterations", f"{iterations:,.0f}"),
            ("training time", f"{seconds / 60:.1f} min"),
            ("per iteration", f"{1000 * seconds / iterations:.1f} ms"),
        ]
    saves = [spent for entry in log if entry.get("kind") == "save" and (spent := _sane(entry.get("seconds")))]
    if saves:
        rows.append(("per save", f"{1000 * sum(saves) / len(saves):.0f} ms"))
    return rows


def _sane(value: Any) -> float | None:
    """A number of the log that can be counted with."""
    found = number(value)
    return found if found is not None and 0 <= found < 1e15 else None


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><td>{html.escape(a)}</td><td class=n>{html.escape(b)}</td></tr>" for a, b in rows)
    return f"<table>{''.join(cells)}</table>"


def _figure(address: str, caption: str, kind: str = "") -> str:
    return (
        f'<figure class="{kind}"><img src="{address}" alt=""><figcaption>{html.escape(caption)}</figcaption></figure>'
    )
