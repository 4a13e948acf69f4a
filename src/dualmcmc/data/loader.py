"""Batches for training, on the device, in an order that depends on the seed alone.

Images that fit are kept on the device and indexed there. Others are streamed: threads read ahead from the store into a
few buffers (pinned, for CUDA), and the copy to the device overlaps with computation. Both give the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data.store import ImageStore
from dualmcmc.rng import Stream, derive_seed, make_generator
from dualmcmc.utils.device import available_memory

CHUNK = 10_000  # images copied to a device at a time
MEMORY_FRACTION = {"cuda": 0.25, "cpu": 0.5}  # of the free memory, for images


def fits(store: ImageStore, device: torch.device) -> bool:
    """Whether all images can be kept on the device, beside the networks."""
    return store.nbytes <= MEMORY_FRACTION.get(device.type, 0.25) * available_memory(device)


class BatchLoader:
    """The batches of a run: `batch` consecutive images each of an endless shuffled sequence.

    `batch` is the global batch size; process `rank` of `world_size` gets an equal part of each batch.
    """

    def __init__(
        self,
        store: ImageStore,
        seed: int,
        batch: int,
        device: torch.device,
        place: Literal["auto", "device", "stream"] = "auto",
        flip: bool = False,
        workers: int = 4,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch % world_size:
            raise ValueError(f"a batch of {batch} cannot be split evenly over {world_size} processes")
        self.count, self.flip = len(store), flip
        self.local_batch = batch // world_size
        self._offset = rank * self.local_batch  # of this process in each batch
        self.resident = place == "device" or (place == "auto" and fits(store, device))
        self._order = ShuffledOrder(len(store), seed, device if self.resident else "cpu")
        self._flips = ShuffledOrder(len(store), seed, device)
        self._pixels = _copy_to(device, store) if self.resident else None
        self._stream = None if self.resident else _Stream(store, self._order, self.local_batch, batch, device, workers)

    def get(self, start: int) -> Tensor:
        """(local_batch, C, H, W) on the device: this process's part of the batch that begins at image `start`."""
        return self.gather(*self.select(start))

    def select(self, start: int) -> tuple[Tensor, ...]:
        """The arguments of `gather`: indices of images, or the images themselves if streamed, and which to mirror."""
        begin = start + self._offset
        which = self._order.indices(begin, self.local_batch) if self._stream is None else self._stream.get(begin)
        return (which, self._flips.flips(begin, self.local_batch)) if self.flip else (which,)

    def indices(self, start: int) -> Tensor:
        """The indices in the training set of the images that `select` chooses, on the device."""
        return self._order.indices(start + self._offset, self.local_batch).to(self._flips.device)

    def gather(self, which: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """The selected batch. Runs on the device alone, so that a CUDA graph can capture it."""
        x = which if self._pixels is None else self._pixels[which]
        return x if mirrored is None else torch.where(mirrored[:, None, None, None], x.flip(-1), x)

    def close(self) -> None:
        """Stop the reader threads."""
        if self._stream is not None:
            self._stream.close()


def _copy_to(device: torch.device, store: ImageStore) -> Tensor:
    """All images on the device, copied in chunks to bound host memory."""
    if device.type == "cpu":
        return store.tensor()
    pixels = torch.empty(store.shape, dtype=store.dtype, device=device)
    for part in torch.arange(len(store)).split(CHUNK):
        pixels[part[0] : part[-1] + 1] = store.take(part).to(device)
    return pixels


class _Stream:
    """Reads a few batches ahead, in threads."""

    def __init__(
        self, store: ImageStore, order: ShuffledOrder, local_batch: int, batch: int, device: torch.device, workers: int
    ) -> None:
        self.store, self.order, self.local_batch, self.batch, self.device = store, order, local_batch, batch, device
        pinned = device.type == "cuda"
        shape = (local_batch, *store.shape[1:])
        count = workers + 2
        self._buffers = [torch.empty(shape, dtype=store.dtype, pin_memory=pinned) for _ in range(count)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(count)]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
        self._waiting: deque[tuple[int, int, Future[None]]] = deque()  # begin, buffer, read task

    def get(self, begin: int) -> Tensor:
        """The local batch that begins at image `begin`; the next ones are read in the background."""
        if not self._waiting or self._waiting[0][0] != begin:
            self._restart(begin)
        _, slot, reading = self._waiting.popleft()
        reading.result()
        buffer, copied = self._buffers[slot], self._copied[slot]
        x = buffer.to(self.device, non_blocking=True, copy=True)
        if copied is not None:
            copied.record(torch.cuda.current_stream(self.device))
        self._submit(begin + len(self._buffers) * self.batch, slot)
        return x

    def _restart(self, begin: int) -> None:
        """Read from another position."""
        for _, _, reading in self._waiting:
            reading.cancel()
        wait([reading for _, _, reading in self._waiting])  # those that run write into the buffers
        self._waiting.clear()
        for slot in range(len(self._buffers)):
            self._submit(begin + slot * self.batch, slot)

    def _submit(self, begin: int, slot: int) -> None:
        indices = self.order.indices(begin, self.local_batch).numpy()
        self._waiting.append((begin, slot, self._pool.submit(self._read, indices, slot)))

    def _read(self, indices: np.ndarray, slot: int) -> None:
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()  # in this thread, so that training never waits for a copy
        self.store.read(indices, self._buffers[slot].numpy())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class ShuffledOrder:
    """An endless sequence of `count` items: a new seeded permutation per epoch."""

    def __init__(self, count: int, seed: int, device: torch.device | str = "cpu") -> None:
        self.count, self.seed, self.device = count, seed, device
        self._order_epoch = self._flip_epoch = -1
        self._order = torch.empty(0, dtype=torch.long)
        self._flips = torch.empty(0, dtype=torch.bool)

    def indices(self, start: int, length: int) -> Tensor:
        """The items at positions start, ..., start + length - 1; these may span epochs."""
        return self._slice(self._epoch_order, start, length)

    def flips(self, start: int, length: int) -> Tensor:
        """Whether each of these items is mirrored: a fair coin per item and epoch."""
        return self._slice(self._epoch_flips, start, length)

    def _slice(self, epoch_values: Callable[[int], Tensor], start: int, length: int) -> Tensor:
        parts = []
        while length > 0:
            epoch, offset = divmod(start, self.count)
            part = epoch_values(epoch)[offset : offset + length]
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return torch.cat(parts)

    def _epoch_order(self, epoch: int) -> Tensor:
        if epoch != self._order_epoch:
            rng = make_generator(derive_seed(self.seed, Stream.ORDER, epoch))
            self._order_epoch, self._order = epoch, self._to_device(torch.randperm(self.count, generator=rng))
        return self._order

    def _epoch_flips(self, epoch: int) -> Tensor:
        if epoch != self._flip_epoch:
            rng = make_generator(derive_seed(self.seed, Stream.FLIPS, epoch))
            self._flip_epoch, self._flips = epoch, self._to_device(torch.rand(self.count, generator=rng) < 0.5)
        return self._flips

    def _to_device(self, values: Tensor) -> Tensor:
        """Values are drawn on the CPU, so that all devices get the same; the copy to a GPU is asynchronous."""
        if torch.device(self.device).type != "cuda":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)
