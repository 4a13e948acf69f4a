"""Images per second of every way to load training images, compared with what a training step consumes.

    python benchmarks/data.py [TARGET] [KEY=VALUE ...] [--images N] [--seconds S] [--folder DIR] [--device D] [--json]

Writes random images to a packed file, reads them from the file, from RAM and from device memory, decodes PNG and JPEG,
trains while streaming from the file, and measures peak memory. Without TARGET: the networks of digits on 64x64 RGB.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

import common
from dualmcmc import rng
from dualmcmc.bench import timing
from dualmcmc.config import Config
from dualmcmc.data import pack
from dualmcmc.data.images import ImageSpec
from dualmcmc.data.loader import BatchLoader
from dualmcmc.data.source import FileSource
from dualmcmc.data.store import ImageStore, MemoryStore
from dualmcmc.engine.cuda import WARMUP_RUNS
from dualmcmc.engine.plan import ExecutionPlan
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.step import TrainStep
from dualmcmc.utils.device import format_bytes, peak_resident_memory
from dualmcmc.utils.files import make_folder

RAM_IMAGES = 20_000  # images in the measurements from RAM and device memory
Notify = Callable[[str], None]
Place = Literal["device", "stream"]


def measure(
    config: Config,
    images: int,
    seconds: float,
    folder: Path | None = None,
    device: str = "auto",
    notify: Notify = lambda text: None,
) -> dict[str, Any]:
    """All measurements, on `images` random images of the config's shape; `seconds` for each."""
    plan = timing.set_up(config, device, notify)
    shape = (config.data.channels, config.data.size, config.data.size)
    with tempfile.TemporaryDirectory(dir=None if folder is None else make_folder(folder)) as scratch:
        path = Path(scratch) / "random.pack"
        notify(f"writing {images:,} images of {shape[1]}x{shape[2]}, {format_bytes(images * int(np.prod(shape)))}")
        start = time.monotonic()
        pack.write(path, {"train": random_images(images, shape)}, shape, {"crop": None})
        packing_rate = images / (time.monotonic() - start)
        store: ImageStore = pack.read(path)[0]["train"]
        notify("training while streaming from the file")  # first, so that peak memory is that of streaming
        streamed = training_rate(config, store, plan, seconds, "stream", notify)
        rates = {"packed file": loading_rate(config, store, plan.device, seconds, "stream", min_images=images)}
        peak_memory = peak_resident_memory()  # after at least one epoch
        sample = MemoryStore(store.first(min(images, RAM_IMAGES)))
        notify("loading from RAM and from device memory")
        rates["RAM"] = loading_rate(config, sample, plan.device, seconds, "stream")
        rates["device memory"] = loading_rate(config, sample, plan.device, seconds, "device")
        resident = training_rate(config, sample, plan, seconds, "device", notify)
        notify("decoding PNG and JPEG")
        for kind in ("PNG", "JPEG"):
            rates[f"decoding {kind}"] = decoding_rate(config, kind, seconds)
    return {
        **timing.describe(config, plan.device),
        "batch": config.train.batch,
        "images": images,
        "shape": list(shape),
        "dataset_bytes": store.nbytes,
        "packing_images_per_second": packing_rate,
        "loading_images_per_second": rates,
        "training_resident": resident,
        "training_streamed": streamed,
        "peak_memory_bytes": peak_memory,
    }


def random_images(count: int, shape: tuple[int, int, int]) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for start in range(0, count, 1024):
        yield from generator.integers(0, 256, (min(1024, count - start), *shape), dtype=np.uint8)


def loading_rate(
    config: Config, store: ImageStore, device: torch.device, seconds: float, place: Place, min_images: int = 0
) -> float:
    """Images per second that arrive on an otherwise idle device."""
    batch = config.train.batch
    loader = BatchLoader(store, config.seed, batch, device, place, workers=config.data.workers)
    rate = image_rate(lambda index: loader.get(index * batch), batch, device, seconds, -(-min_images // batch))
    loader.close()
    return rate


class TimedLoader(BatchLoader):
    """Measures how long training waits for it."""

    waiting_seconds = 0.0

    def select(self, start: int) -> tuple[torch.Tensor, ...]:
        before = time.monotonic()
        selection = super().select(start)
        self.waiting_seconds += time.monotonic() - before
        return selection


def training_rate(
    config: Config, store: ImageStore, plan: ExecutionPlan, seconds: float, place: Place, notify: Notify
) -> dict[str, Any]:
    """Images per second of training, the fraction of time spent waiting for images, and memory at the start."""
    loader = TimedLoader(store, config.seed, config.train.batch, plan.device, place, workers=config.data.workers)
    step = TrainStep(config, TrainState(config, plan.device), loader, plan)
    step.prepare(notify=notify)
    for _ in range(WARMUP_RUNS + 1 if step.plan.uses_cuda_graph else 1):
        step()
    memory = peak_resident_memory()
    start, loader.waiting_seconds = time.monotonic(), 0.0
    rate = image_rate(lambda _: step(), config.train.batch, plan.device, seconds)
    loader.close()
    return {
        "images_per_second": rate,
        "waiting_fraction": loader.waiting_seconds / (time.monotonic() - start),
        "memory_bytes_at_start": memory,
        "engine": step.plan.summary,
    }


def image_rate(
    action: Callable[[int], object], batch: int, device: torch.device, seconds: float, min_batches: int = 2
) -> float:
    """Images per second of `action`, called with the index of each batch."""
    action(1)
    timing.synchronize(device)
    start, index = time.monotonic(), 1
    while index <= max(2, min_batches) or time.monotonic() - start < seconds:
        index += 1
        action(index)
        if index % 20 == 0:
            timing.synchronize(device)
    timing.synchronize(device)
    return (index - 1) * batch / (time.monotonic() - start)


def decoding_rate(config: Config, kind: str, seconds: float) -> float:
    """Images per second decoded from files in memory: the cost of an image folder at the start of a run."""
    size, channels = config.data.size, config.data.channels
    noise = torch.rand(64, channels, 8, 8, generator=rng.make_generator(0)) * 255
    smooth = torch.nn.functional.interpolate(noise, size=(size, size), mode="bicubic")
    encoded = []
    for image in smooth.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy():
        buffer = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(buffer, kind)
        encoded.append(buffer.getvalue())

    def endless() -> Iterator[tuple[str, Callable[[], bytes]]]:
        while True:
            yield from (("", lambda content=content: content) for content in encoded)

    count, start = 0, time.monotonic()
    for _ in FileSource(kind, endless, None).items(ImageSpec.from_config(config.data)):
        count += 1
        if time.monotonic() - start > seconds:
            break
    return count / (time.monotonic() - start)


def format_result(result: dict[str, Any]) -> str:
    """The result as a table."""
    consumed, streamed = result["training_resident"]["images_per_second"], result["training_streamed"]
    _, height, width = result["shape"]
    lines = [
        f"{result['preset']}, batch {result['batch']}, {timing.format_environment(result)}",
        f"{result['images']:,} images of {height}x{width}, {format_bytes(result['dataset_bytes'])}",
        "",
        f"{'source':<28} {'images/s':>12} {'x training':>15}",
    ]
    for name, rate in result["loading_images_per_second"].items():
        lines.append(f"{name:<28} {rate:>12,.0f} {rate / consumed:>15,.1f}")
    lines += [
        f"{'packing':<28} {result['packing_images_per_second']:>12,.0f}",
        "",
        f"training from device memory {consumed:>13,.0f} images/s",
        f"training while streaming    {streamed['images_per_second']:>13,.0f} images/s, "
        f"{100 * streamed['waiting_fraction']:.2f} % of the time waiting for images",
        f"peak memory (RSS)           {format_bytes(result['peak_memory_bytes']):>13} while streaming, "
        f"{format_bytes(streamed['memory_bytes_at_start'])} after the first iteration",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--images", type=common.at_least(100), default=200_000, help="images to generate")
    parser.add_argument("--seconds", type=common.at_least(0.05, float), default=3.0, help="time per measurement")
    parser.add_argument("--folder", type=Path, help="folder for the generated file, on the disk to measure")
    args = parser.parse_intermixed_args()
    config = common.load_config(args, defaults=["data.size=64", "data.channels=3"])
    result = measure(config, args.images, args.seconds, args.folder, args.device, common.notify)
    common.print_result(result, args.json, format_result)


if __name__ == "__main__":
    common.run(main)
