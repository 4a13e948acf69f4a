"""CelebA (aligned, with its partition file where there is one) and CelebA-HQ: folders or zips of images."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from dualmcmc.data.containers import NoImages, open_source
from dualmcmc.data.source import Source
from dualmcmc.errors import UserError
from dualmcmc.words import plain

IMAGES = ("img_align_celeba.zip", "img_align_celeba")
NUMBERED = "[0-9]" * 6 + ".*"  # 000001.jpg
PARTITION = "list_eval_partition.txt"
SPLITS = ("train", "valid", "test")  # 0, 1 and 2 in the partition file


def read_celeba(path: Path) -> dict[str, Source]:
    """img_align_celeba (folder or zip) split by list_eval_partition.txt; without that file all is `train`."""
    images = next((path / name for name in IMAGES if (path / name).exists()), path)
    if images.is_dir() and not any(images.rglob(NUMBERED)):  # other pictures may lie there
        return {}
    beside = [folder / PARTITION for folder in (path, path / "Eval", images.parent)]
    partition = next((file for file in beside if file.is_file()), None)
    if partition is None:
        return _all_of(images)
    split_of = parse_partition(partition)

    def split_is(wanted: str, name: str) -> bool:
        last = Path(name).name
        if last not in split_of:
            raise UserError(f"'{plain(last)}' of '{images}' is not in '{partition}': the two do not belong together.")
        return split_of[last] == wanted

    found: dict[str, Source] = {}
    for split in SPLITS:
        with suppress(NoImages):
            found[split] = open_source(images, partial(split_is, split))
    return found


def parse_partition(path: Path) -> dict[str, str]:
    """Name -> split, of lines such as `000001.jpg 0`."""
    split_of = {}
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read '{path}': {error}.") from None
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words[0] == "image_id":  # a heading, in copies as CSV
            continue
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise UserError(f"'{path}' line {number}: expected 'NAME 0|1|2', found '{plain(line[:60])}'.")
        split_of[words[0]] = SPLITS[int(words[1])]
    return split_of


def read_celebahq(path: Path) -> dict[str, Source]:
    """Any folder or zip of the 30,000 images; one zip inside a folder counts."""
    zips = sorted(path.glob("*.zip")) if path.is_dir() else []
    return _all_of(path) or (_all_of(zips[0]) if zips else {})


def _all_of(path: Path) -> dict[str, Source]:
    """Everything as one split, or nothing."""
    try:
        return {"train": open_source(path)}
    except NoImages:
        return {}
