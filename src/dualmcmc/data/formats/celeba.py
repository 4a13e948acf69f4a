"""CelebA (aligned images, split by its partition file if present) and CelebA-HQ: folders or zips of images."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from dualmcmc.data.formats import open_source
from dualmcmc.data.formats.folder import NoImages
from dualmcmc.data.source import ImageSource
from dualmcmc.utils.errors import UserError, sanitize

IMAGES = ("img_align_celeba.zip", "img_align_celeba")
NUMBERED = "[0-9]" * 6 + ".*"  # 000001.jpg
PARTITION = "list_eval_partition.txt"
SPLITS = ("train", "valid", "test")  # 0, 1 and 2 in the partition file


def read_celeba(path: Path) -> dict[str, ImageSource]:
    """img_align_celeba (folder or zip), split by list_eval_partition.txt; without that file all images are `train`."""
    images = next((path / name for name in IMAGES if (path / name).exists()), path)
    if images.is_dir() and not any(images.rglob(NUMBERED)):  # it may contain other images
        return {}
    candidates = [folder / PARTITION for folder in (path, path / "Eval", images.parent)]
    partition = next((file for file in candidates if file.is_file()), None)
    if partition is None:
        return _all_images(images)
    split_of = parse_partition(partition)

    def is_in(split: str, name: str) -> bool:
        file = Path(name).name
        if file not in split_of:
            raise UserError(f"'{sanitize(file)}' in '{images}' is not listed in '{partition}': they do not match.")
        return split_of[file] == split

    sources: dict[str, ImageSource] = {}
    for split in SPLITS:
        with suppress(NoImages):
            sources[split] = open_source(images, partial(is_in, split))
    return sources


def parse_partition(path: Path) -> dict[str, str]:
    """Map file names to splits, from lines such as `000001.jpg 0`."""
    split_of = {}
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read '{path}': {error}.") from None
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words[0] == "image_id":  # the header of CSV copies
            continue
        if len(words) != 2 or words[1] not in ("0", "1", "2"):
            raise UserError(f"'{path}' line {number}: expected 'NAME 0|1|2', found '{sanitize(line[:60])}'.")
        split_of[words[0]] = SPLITS[int(words[1])]
    return split_of


def read_celebahq(path: Path) -> dict[str, ImageSource]:
    """A folder or zip of the 30,000 images, or a folder that contains the zip."""
    zips = sorted(path.glob("*.zip")) if path.is_dir() else []
    return _all_images(path) or (_all_images(zips[0]) if zips else {})


def _all_images(path: Path) -> dict[str, ImageSource]:
    try:
        return {"train": open_source(path)}
    except NoImages:
        return {}
