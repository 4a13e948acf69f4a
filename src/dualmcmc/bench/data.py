"""How fast images arrive by each path, beside how fast a training step takes them, and what memory it costs."""

from __future__ import annotations

import io
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dualmcmc import rng
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.data import pack
from dualmcmc.data.feed import Feed
from dualmcmc.data.images import Fit
from dualmcmc.data.machine import in_words as amount
from dualmcmc.data.source import Files
from dualmcmc.data.store import Memory, Store
from dualmcmc.engine.accelerate import Means
from dualmcmc.engine.graph import WARM_UP
from dualmcmc.engine.iteration import Iteration
from dualmcmc.engine.state import TrainState
from dualmcmc.files import make_folder

Say = Callable[[str], None]


def measure(
    config: Config, images: int, seconds: float, folder: Path | None, device: str, say: Say = lambda text: None
) -> dict[str, Any]:
    """Everything, on a generated set of `images` images in the config's shape."""
    means = timing.begin(config, device, say)
    place, shape = means.device, (config.data.channels, config.data.size, config.data.size)
    with tempfile.TemporaryDirectory(dir=None if folder is None else make_folder(folder)) as scratch:
        path = Path(scratch) / "generated.pack"
        say(f"generating {images:,} images of {shape[1]}x{shape[2]}, {amount(images * int(np.prod(shape)))}")
        begun = time.monotonic()
        pack.write(path, {"train": _generated(images, shape)}, shape, {"crop": None})
        written = images / (time.monotonic() - begun)
        store: Store = pack.read(path)[0]["train"]
        say("streaming from the file, beside training")  # first: peak memory must not know the other paths
        training = _train(config, store, means, seconds, "stream", say)
        feeds = {"packed file": _feed(store, config, place, seconds, "stream", at_least=images)}
        peak = _resident_peak()  # after an epoch and more
        sample = Memory(store.first(min(images, 20_000)))
        say("from RAM and from the device's memory")
        feeds["RAM"] = _feed(sample, config, place, seconds, "stream")
        feeds["device memory"] = _feed(sample, config, place, seconds, "device")
        resident = _train(config, sample, means, seconds, "device", say)
        say("decoding PNG and JPEG")
        for kind in ("PNG", "JPEG"):
            feeds[f"decoding {kind}"] = _decode(sample, kind, config, seconds)
    return {
        **timing.described(config, place),
        "batch": config.train.batch,
        "images": images,
        "shape": list(shape),
        "set_bytes": store.nbytes,
        "writing_images_per_second": written,
        "feeds_images_per_second": feeds,
        "training_resident": resident,
        "training_streamed": training,
        "peak_memory_streamed": peak,
    }


def _resident_peak() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _generated(count: int, shape: tuple[int, int, int]) -> Iterator[np.ndarray]:
    """Noise in blocks: quick to make, all different."""
    source = np.random.default_rng(0)
    for start in range(0, count, 1024):
        yield from source.integers(0, 256, (min(1024, count - start), *shape), dtype=np.uint8)


def _feed(store: Store, config: Config, device: torch.device, seconds: float, place: Any, at_least: int = 0) -> float:
    """Images a second that arrive on the device, with nothing else to do."""
    feed = Feed(store, config.seed, config.train.batch, device, place, workers=config.data.workers)
    batch = config.train.batch
    rate = _rate(lambda number: feed.get(number * batch), batch, device, seconds, -(-at_least // batch))
    feed.close()
    return rate


class _Timed(Feed):
    """Knows how long it was waited for."""

    waited = 0.0

    def plan(self, start: int) -> tuple[torch.Tensor, ...]:
        begun = time.monotonic()
        planned = super().plan(start)
        self.waited += time.monotonic() - begun
        return planned


def _train(config: Config, store: Store, means: Means, seconds: float, place: Any, say: Say) -> dict[str, Any]:
    """Images a second of real training, the share of it spent waiting for images, and memory at its start."""
    device = means.device
    feed = _Timed(store, config.seed, config.train.batch, device, place, workers=config.data.workers)
    iteration = Iteration(config, TrainState(config, device), feed, means)
    iteration.prepare(note=say)
    for _ in range(WARM_UP + 1 if iteration.means.graphed else 1):
        iteration()
    memory = _resident_peak()
    begun, feed.waited = time.monotonic(), 0.0
    rate = _rate(lambda _: iteration(), config.train.batch, device, seconds)
    feed.close()
    share = feed.waited / (time.monotonic() - begun)
    engine = iteration.means.in_words
    return {"images_per_second": rate, "waiting_share": share, "memory_at_start": memory, "engine": engine}


def _rate(action: Callable[[int], Any], batch: int, device: torch.device, seconds: float, at_least: int = 2) -> float:
    action(1)
    timing.wait(device)
    begun, number = time.monotonic(), 1
    while number <= max(2, at_least) or time.monotonic() - begun < seconds:
        number += 1
        action(number)
        if number % 20 == 0:
            timing.wait(device)
    timing.wait(device)
    return (number - 1) * batch / (time.monotonic() - begun)


def _decode(store: Memory, kind: str, config: Config, seconds: float) -> float:
    """Images a second from encoded files in memory: what a folder costs at the start of a run."""
    noise = rng.generator(0)
    smooth = torch.nn.functional.interpolate(
        torch.rand(64, store.shape[1], 8, 8, generator=noise) * 255, size=store.shape[2:], mode="bicubic"
    )
    encoded = []
    for image in smooth.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(buffer, kind)
        encoded.append(buffer.getvalue())

    def endless() -> Iterator[tuple[str, Callable[[], bytes]]]:
        while True:
            yield from (("", lambda content=content: content) for content in encoded)

    count, begun = 0, time.monotonic()
    for _ in Files(kind, endless, None).items(Fit.of(config.data)):
        count += 1
        if time.monotonic() - begun > seconds:
            break
    return count / (time.monotonic() - begun)


def in_words(result: dict[str, Any]) -> str:
    """The result as a table."""
    appetite = result["training_resident"]["images_per_second"]
    streamed = result["training_streamed"]
    lines = [
        f"{result['preset']}, batch {result['batch']}, {timing.where(result)}",
        f"{result['images']:,} images of {result['shape'][1]}x{result['shape'][2]}, {amount(result['set_bytes'])}",
        "",
        f"{'images arriving by':<28} {'images/s':>12} {'x the appetite':>15}",
    ]
    for name, rate in result["feeds_images_per_second"].items():
        lines.append(f"{name:<28} {rate:>12,.0f} {rate / appetite:>15,.1f}")
    lines += [
        f"{'packing':<28} {result['writing_images_per_second']:>12,.0f}",
        "",
        f"a training step takes       {appetite:>13,.0f} images/s, from the device's memory",
        f"the same, streamed          {streamed['images_per_second']:>13,.0f} images/s, "
        f"{100 * streamed['waiting_share']:.2f} % of the time waiting for images",
        f"peak memory (RSS)           {amount(result['peak_memory_streamed']):>13} while streaming, "
        f"{amount(streamed['memory_at_start'])} after the first iteration",
    ]
    return "\n".join(lines)
