"""Image sources: streams of images from files, arrays or stores, converted to one size."""

from __future__ import annotations

import hashlib
import shlex
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dualmcmc.data.images import ImageSpec, UnreadableImage, convert, decode
from dualmcmc.data.store import ImageStore, MemoryStore
from dualmcmc.utils.device import available_memory, cpu_count, format_bytes
from dualmcmc.utils.errors import UserError, sanitize
from dualmcmc.utils.progress import ProgressFactory, no_progress

Item = tuple[str, np.ndarray | UnreadableImage]  # an image's name, and its (H, W, C) uint8 pixels or what is wrong
EncodedImage = tuple[str, Callable[[], bytes]]  # an image's name, and a function that reads its content
Unreadable = tuple[str, str]  # an image's name, and the reason
MAX_NAMED = 5  # unreadable images named in one message
MAX_NAME_LENGTH = 300  # of these, in characters
FILES_PER_TASK = 8  # files decoded per thread pool task
MAX_READAHEAD = 1 << 29  # bytes of archive members read ahead
INITIAL_CAPACITY = 4096  # images allocated at first if their number is unknown


class ImageSource(ABC):
    """A stream of images that can be iterated repeatedly."""

    name: str  # for messages
    count: int | None = None  # None: unknown before the end
    skipped: Sequence[Unreadable] = ()  # during the last iteration

    @abstractmethod
    def items(self, spec: ImageSpec) -> Iterator[Item]:
        """All images in order, converted to `spec`, including the unreadable ones."""

    def images(
        self, spec: ImageSpec, skip_bad: bool = False, progress: ProgressFactory = no_progress
    ) -> Iterator[np.ndarray]:
        """(C, H, W) uint8 pixels of each image. Unreadable ones are skipped, or raise an error at the end."""
        unreadable: list[Unreadable] = []
        good = 0
        with progress(f"reading {self.name}", self.count, "images") as advance:
            for name, pixels in self.items(spec):
                advance(1)
                if isinstance(pixels, UnreadableImage):
                    unreadable.append((name, str(pixels)))
                elif not unreadable or skip_bad:
                    good += 1
                    yield pixels.transpose(2, 0, 1)
        if unreadable and not skip_bad:
            advice = "Repair or remove them, or skip them with data.skip_bad=true ('dualmcmc data': --skip-bad)."
            raise UserError(f"{format_unreadable(unreadable)} {advice}")
        self.skipped = unreadable
        if unreadable and not good:
            raise UserError(f"{format_unreadable(unreadable)} No image is left.")


def format_unreadable(images: Sequence[Unreadable]) -> str:
    """One sentence that names unreadable images; a reason they share appears once."""
    more = f" and {len(images) - MAX_NAMED:,} more" if len(images) > MAX_NAMED else ""
    count = "1 image" if len(images) == 1 else f"{len(images):,} images"
    if len({reason for _, reason in images}) == 1:
        names = ", ".join(f"'{sanitize(name, MAX_NAME_LENGTH)}'" for name, _ in images[:MAX_NAMED])
        return f"{count} cannot be used ({images[0][1]}): {names}{more}."
    some = ", ".join(f"'{sanitize(name, MAX_NAME_LENGTH)}' ({reason})" for name, reason in images[:MAX_NAMED])
    return f"{count} cannot be used: {some}{more}."


class FileSource(ImageSource):
    """Encoded images, decoded on all cores. `listing` returns their names and read functions."""

    def __init__(self, name: str, listing: Callable[[], Iterable[EncodedImage]], count: int | None) -> None:
        self.name, self.count, self._listing = name, count, listing

    def items(self, spec: ImageSpec) -> Iterator[Item]:  # noqa: D102
        def work(part: list[EncodedImage]) -> list[Item]:
            return [_decode(name, read, spec) for name, read in part]

        files_per_task = FILES_PER_TASK if spec.size is not None else 1  # a photo at full size takes 100 MB
        workers = cpu_count()
        waiting: deque[tuple[Future[list[Item]], int]] = deque()
        with ThreadPoolExecutor(workers) as pool:
            try:
                for part, size in _parts(self._listing(), files_per_task):
                    waiting.append((pool.submit(work, part), size))
                    while len(waiting) > workers + 1 or sum(size for _, size in waiting) > MAX_READAHEAD:
                        yield from waiting.popleft()[0].result()
                while waiting:
                    yield from waiting.popleft()[0].result()
            finally:
                for future, _ in waiting:
                    future.cancel()


def _decode(name: str, read: Callable[[], bytes], spec: ImageSpec) -> Item:
    try:
        return name, decode(read(), spec)
    except UnreadableImage as error:
        return name, UnreadableImage(str(error))  # a new one: the traceback of `error` keeps the content alive
    except OSError as error:
        return name, UnreadableImage(error.strerror or str(error))


class InMemory:
    """The content of an archive member that was read ahead: only one thread can read an archive."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> bytes:
        """The content."""
        return self.content


def _parts(listing: Iterable[EncodedImage], files_per_task: int) -> Iterator[tuple[list[EncodedImage], int]]:
    """Files for one thread pool task each, and how many bytes of them are in memory."""
    part: list[EncodedImage] = []
    size = 0
    for name, read in listing:
        part.append((name, read))
        size += len(read.content) if isinstance(read, InMemory) else 0
        if len(part) == files_per_task or size > MAX_READAHEAD // 8:
            yield part, size
            part, size = [], 0
    if part:
        yield part, size


class ArraySource(ImageSource):
    """Decoded images. `load` returns (N, H, W, C) uint8 pixels; it is called when they are needed."""

    def __init__(self, name: str, load: Callable[[], np.ndarray], count: int | None = None) -> None:
        self.name, self.count, self._load = name, count, load

    def items(self, spec: ImageSpec) -> Iterator[Item]:  # noqa: D102
        for index, pixels in enumerate(self._load()):
            yield _convert(f"{self.name}[{index}]", pixels, spec)


class StoreSource(ImageSource):
    """The images of a store."""

    def __init__(self, name: str, store: ImageStore) -> None:
        self.name, self.count, self.store = name, len(store), store

    def items(self, spec: ImageSpec) -> Iterator[Item]:  # noqa: D102
        for start in range(0, len(self.store), 256):
            part = self.store.take(np.arange(start, min(start + 256, len(self.store))))
            for index, pixels in enumerate(part.permute(0, 2, 3, 1).numpy(), start):
                yield _convert(f"{self.name}[{index}]", pixels, spec)


def _convert(name: str, pixels: np.ndarray, spec: ImageSpec) -> Item:
    try:
        return name, convert(pixels, spec)
    except UnreadableImage as error:
        return name, error


def to_memory(
    source: ImageSource, spec: ImageSpec, skip_bad: bool = False, progress: ProgressFactory = no_progress
) -> MemoryStore:
    """All images of a source in one tensor; raises `UserError` if they need over half of the free memory."""
    if spec.size is None or spec.channels is None:
        raise ValueError("to_memory() needs a size and a number of channels")
    shape = (spec.channels, spec.size, spec.size)
    image_bytes = spec.channels * spec.size**2
    budget = available_memory() // 2
    max_images = budget // image_bytes
    if source.count is not None and source.count > max_images:
        raise _too_large(source, spec, source.count * image_bytes, budget)
    pixels = np.empty((source.count or min(INITIAL_CAPACITY, max_images), *shape), np.uint8)
    count = 0
    for image in source.images(spec, skip_bad, progress):
        if count == len(pixels):
            if count >= max_images // 2:
                raise _too_large(source, spec, count * image_bytes, budget)
            pixels = np.concatenate([pixels, np.empty_like(pixels)])
        pixels[count] = image
        count += 1
    if count == 0:
        raise UserError(f"'{source.name}' contains no images.")
    kept = pixels[:count]
    return MemoryStore(torch.from_numpy(kept if count > 0.75 * len(pixels) else kept.copy()))


def _too_large(source: ImageSource, spec: ImageSpec, needed: int, budget: int) -> UserError:
    target = shlex.quote(source.name) if Path(source.name).exists() else "NAME"
    options = f"--size {spec.size} --channels {spec.channels} --crop {spec.crop} --resize {spec.resize}"
    return UserError(
        f"'{source.name}' needs at least {format_bytes(needed)} of memory, {format_bytes(budget)} are available: pack "
        f"it with 'dualmcmc data pack {target} {options} --out FILE.pack' and use data.path=FILE.pack."
    )


class ImageChecksum:
    """A checksum of a set of images that does not depend on their order."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def add(self, image: np.ndarray) -> bytes:
        """Add one (C, H, W) image; returns its digest."""
        digest = hashlib.sha256(repr(image.shape).encode() + np.ascontiguousarray(image).tobytes()).digest()
        self.digests.append(digest)
        return digest

    @property
    def checksum(self) -> str:
        """SHA-256 of the sorted digests."""
        return hashlib.sha256(b"".join(sorted(self.digests))).hexdigest()
