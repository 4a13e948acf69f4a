"""Images on their way in: a stream of pixels from files or arrays, fitted to one size as they come."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dualmcmc.data.images import BadImage, Fit, decode, fit_pixels
from dualmcmc.data.machine import available_memory, in_words
from dualmcmc.data.store import Memory, Store
from dualmcmc.errors import UserError
from dualmcmc.progress import Watch, quiet
from dualmcmc.words import plain

Item = tuple[str, np.ndarray | BadImage]  # an image's name, and its (H, W, C) bytes or what is wrong with it
Bad = tuple[str, str]  # an image's name, and what is wrong with it
NAMED = 5  # bad files named in one message
LONGEST = 300  # characters of a name there
TOGETHER = 8  # files decoded by a thread at a time, where they are brought to one size
MOST_HELD = 1 << 29  # bytes of archives read ahead: few where images are large, whatever the number of cores
START = 4096  # images there is room for at first, where their number is not known


class Source(ABC):
    """A stream of images that can be run through again and again."""

    name: str  # for messages
    count: int | None = None  # None: known only at the end
    skipped: Sequence[Bad] = ()  # what the last run through left out

    @abstractmethod
    def items(self, fit: Fit) -> Iterator[Item]:
        """Every image in order, fitted, good or bad."""

    def images(self, fit: Fit, skip_bad: bool = False, watch: Watch = quiet) -> Iterator[np.ndarray]:
        """(C, H, W) bytes of every image. Bad ones are refused when all have been seen, or left out."""
        bad: list[Bad] = []
        good = 0
        with watch(f"reading {self.name}", self.count, "images") as advance:
            for name, pixels in self.items(fit):
                advance(1)
                if isinstance(pixels, BadImage):
                    bad.append((name, str(pixels)))
                elif not bad or skip_bad:
                    good += 1
                    yield pixels.transpose(2, 0, 1)
        if bad and not skip_bad:
            advice = "Mend or remove them, or leave them out: data.skip_bad=true in training, --skip-bad elsewhere."
            raise UserError(f"{bad_list(bad)} {advice}")
        self.skipped = bad
        if bad and not good:
            raise UserError(f"{bad_list(bad)} Nothing is left.")


def bad_list(bad: Sequence[Bad]) -> str:
    """Which images cannot be used, and why, in one sentence; a reason they share is said once."""
    more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
    what = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
    if len({reason for _, reason in bad}) == 1:
        names = ", ".join(f"'{plain(name, LONGEST)}'" for name, _ in bad[:NAMED])
        return f"{what} cannot be used ({bad[0][1]}): {names}{more}."
    some = ", ".join(f"'{plain(name, LONGEST)}' ({reason})" for name, reason in bad[:NAMED])
    return f"{what} cannot be used: {some}{more}."


class Files(Source):
    """Encoded images: names, and for each a function that gives its content. Decoded by all cores."""

    def __init__(
        self, name: str, listing: Callable[[], Iterable[tuple[str, Callable[[], bytes]]]], count: int | None
    ) -> None:
        self.name, self.count, self._listing = name, count, listing

    def items(self, fit: Fit) -> Iterator[Item]:  # noqa: D102
        def one(name: str, content: Callable[[], bytes]) -> Item:
            try:
                return name, decode(content(), fit)
            except BadImage as error:
                return name, BadImage(str(error))  # a new one: the old holds on to the file's content
            except OSError as error:
                return name, BadImage(error.strerror or str(error))

        def work(part: list[tuple[str, Callable[[], bytes]]]) -> list[Item]:
            return [one(name, content) for name, content in part]

        together = TOGETHER if fit.size is not None else 1  # at full size, few: a photo takes a hundred megabytes
        workers = os.cpu_count() or 1
        waiting: deque[tuple[Future[list[Item]], int]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for part, size in _parts(self._listing(), together):
                    waiting.append((pool.submit(work, part), size))
                    while len(waiting) > workers + 1 or sum(size for _, size in waiting) > MOST_HELD:
                        yield from waiting.popleft()[0].result()
                while waiting:
                    yield from waiting.popleft()[0].result()
            finally:
                for future, _ in waiting:
                    future.cancel()


Content = tuple[str, Callable[[], bytes]]  # a file's name, and a function that gives what is in it


class Held:
    """A file's content that was read ahead, since archives are read by one thread."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> bytes:
        """The content."""
        return self.content


def _parts(listing: Iterable[Content], together: int) -> Iterator[tuple[list[Content], int]]:
    """Files for one thread at a time, and the bytes of memory they hold: few files, or fewer large ones."""
    part: list[Content] = []
    size = 0
    for name, content in listing:
        part.append((name, content))
        size += len(content.content) if isinstance(content, Held) else 0
        if len(part) == together or size > MOST_HELD // 8:
            yield part, size
            part, size = [], 0
    if part:
        yield part, size


class Arrays(Source):
    """Images already decoded: a function that gives (N, H, W, C) bytes, called when they are wanted."""

    def __init__(self, name: str, load: Callable[[], np.ndarray], count: int | None = None) -> None:
        self.name, self.count, self._load = name, count, load

    def items(self, fit: Fit) -> Iterator[Item]:  # noqa: D102
        for index, pixels in enumerate(self._load()):
            yield _fitted(f"{self.name}[{index}]", pixels, fit)


class Stored(Source):
    """A store's images, for another size or for a look at each."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.count, self.store = name, len(store), store

    def items(self, fit: Fit) -> Iterator[Item]:  # noqa: D102
        for start in range(0, len(self.store), 256):
            part = self.store.take(np.arange(start, min(start + 256, len(self.store))))
            for index, pixels in enumerate(part.permute(0, 2, 3, 1).numpy(), start):
                yield _fitted(f"{self.name}[{index}]", pixels, fit)


def _fitted(name: str, pixels: np.ndarray, fit: Fit) -> Item:
    try:
        return name, fit_pixels(pixels, fit)
    except BadImage as error:
        return name, error


def to_memory(source: Source, fit: Fit, skip_bad: bool = False, watch: Watch = quiet) -> Memory:
    """All images of a source in one tensor; refuses what would fill the machine's memory."""
    if fit.size is None or fit.channels is None:
        raise ValueError("a tensor needs a size and a number of channels")
    shape = (fit.channels, fit.size, fit.size)
    room = available_memory() // 2
    most = room // int(np.prod(shape))
    if source.count is not None and source.count > most:
        raise UserError(_too_many(source, fit, source.count * int(np.prod(shape)), room))
    pixels = np.empty((source.count or min(START, most), *shape), np.uint8)
    count = 0
    for image in source.images(fit, skip_bad, watch):
        if count == len(pixels):
            if count >= most // 2:
                raise UserError(_too_many(source, fit, count * int(np.prod(shape)), room))
            pixels = np.concatenate([pixels, np.empty_like(pixels)])
        pixels[count] = image
        count += 1
    if count == 0:
        raise UserError(f"'{source.name}' holds no images.")
    kept = pixels[:count]
    return Memory(torch.from_numpy(kept if count > 0.75 * len(pixels) else kept.copy()))


def _too_many(source: Source, fit: Fit, needed: int, room: int) -> str:
    what = shlex.quote(source.name) if Path(source.name).exists() else "NAME"
    how = f"--size {fit.size} --channels {fit.channels} --crop {fit.crop} --resize {fit.resize}"
    return (
        f"'{source.name}' takes {in_words(needed)} or more in memory and {in_words(room)} are to spare: pack it "
        f"with 'dualmcmc data pack {what} {how} --out FILE.pack' and use data.path=FILE.pack."
    )
