"""Batches for training, on the device, in the order the seed fixes, wherever the images lie.

Images that fit are kept on the device and gathered there. Others stream: threads read ahead from the
store into a few buffers (pinned, for CUDA), and the copy to the device runs beside the computation.
Both give the same batches, so where the images lie changes nothing in a run.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dualmcmc.data.machine import available_memory
from dualmcmc.data.order import Order
from dualmcmc.data.store import Store

PART = 10_000  # images moved to a device at a time
SHARE = {"cuda": 0.25, "cpu": 0.5}  # of the free memory that images may take


def fits(store: Store, device: torch.device) -> bool:
    """Whether all images can be kept on the device beside the networks."""
    return store.nbytes <= SHARE.get(device.type, 0.25) * available_memory(device)


class Feed:
    """The batches of a run: each `batch` images of an endless walk, shared by `world` processes.

    `batch` counts the images of all processes; this one, number `rank`, gets its even share of each.
    """

    def __init__(
        self,
        store: Store,
        seed: int,
        batch: int,
        device: torch.device,
        place: Literal["auto", "device", "stream"] = "auto",
        flip: bool = False,
        workers: int = 4,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared evenly by {world} processes")
        self.count, self.flip = len(store), flip
        self.share = batch // world
        self._first = rank * self.share  # of this process, in each batch
        self.resident = place == "device" or (place == "auto" and fits(store, device))
        self._order = Order(len(store), seed, device if self.resident else "cpu")
        self._coins = Order(len(store), seed, device)
        self._pixels = _all_on(store, device) if self.resident else None
        self._stream = None if self.resident else _Stream(store, self._order, self.share, batch, device, workers)

    def get(self, start: int) -> Tensor:
        """(share, C, H, W) bytes on the device: this process's images of the batch that begins at `start`."""
        return self.gather(*self.plan(start))

    def plan(self, start: int) -> tuple[Tensor, ...]:
        """What `gather` needs for the batch that begins at `start`: which images, or these; and which to mirror."""
        begin = start + self._first
        which = self._order.indices(begin, self.share) if self._stream is None else self._stream.get(begin)
        return (which, self._coins.flips(begin, self.share)) if self.flip else (which,)

    def gather(self, which: Tensor, mirrored: Tensor | None = None) -> Tensor:
        """A planned batch. Work of the device alone, so that a CUDA graph can do it."""
        x = which if self._pixels is None else self._pixels[which]
        return x if mirrored is None else torch.where(mirrored[:, None, None, None], x.flip(-1), x)

    def close(self) -> None:
        """Let the threads go."""
        if self._stream is not None:
            self._stream.close()


def _all_on(store: Store, device: torch.device) -> Tensor:
    """Every image on the device, by way of a bounded part of the host's memory."""
    if device.type == "cpu":
        return store.tensor()
    pixels = torch.empty(store.shape, dtype=torch.uint8, device=device)
    for part in torch.arange(len(store)).split(PART):
        pixels[part[0] : part[-1] + 1] = store.take(part).to(device)
    return pixels


class _Stream:
    """Reads ahead: at any time a few batches are being read or wait in their buffers."""

    def __init__(self, store: Store, order: Order, share: int, batch: int, device: torch.device, workers: int) -> None:
        self.store, self.order, self.share, self.batch, self.device = store, order, share, batch, device
        pinned = device.type == "cuda"
        shape = (share, *store.shape[1:])
        ahead = workers + 2
        self._buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) for _ in range(ahead)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(ahead)]
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
        self._waiting: deque[tuple[int, int, Future[None]]] = deque()  # begin, buffer, reading it

    def get(self, begin: int) -> Tensor:
        """The share of a batch that begins at `begin`; the ones after it are read meanwhile."""
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
        """Start somewhere else in the walk."""
        for _, _, reading in self._waiting:
            reading.cancel()
        wait([reading for _, _, reading in self._waiting])  # they write into buffers that are needed again
        self._waiting.clear()
        for slot in range(len(self._buffers)):
            self._submit(begin + slot * self.batch, slot)

    def _submit(self, begin: int, slot: int) -> None:
        indices = self.order.indices(begin, self.share).numpy()
        self._waiting.append((begin, slot, self._pool.submit(self._read, indices, slot)))

    def _read(self, indices: np.ndarray, slot: int) -> None:
        copied = self._copied[slot]
        if copied is not None:
            copied.synchronize()  # here, in a thread: the run itself never waits for a copy
        self.store.read(indices, self._buffers[slot].numpy())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
