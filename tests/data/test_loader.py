"""Batches depend on the seed and the position alone, not on where the images are stored."""

import threading
import time

import numpy as np
import pytest
import torch

from dualmcmc.data import pack
from dualmcmc.data.loader import BatchLoader, ShuffledOrder, fits
from dualmcmc.data.store import ImageStore, MemoryStore
from tests.data.makers import pixels

CPU = torch.device("cpu")
IMAGES = pixels(37, 8).transpose(0, 3, 1, 2).copy()


def memory():
    return MemoryStore(torch.from_numpy(IMAGES))


@pytest.fixture
def packed(tmp_path):
    pack.write(tmp_path / "a.pack", {"train": IMAGES}, (3, 8, 8), {})
    return pack.read(tmp_path / "a.pack")[0]["train"]


def read_batches(loader, batches=12, batch=10, start=0):
    got = [loader.get(start + number * batch).clone() for number in range(batches)]
    loader.close()
    return torch.stack(got)


@pytest.mark.parametrize("flip", [False, True])
def test_streamed_and_resident_batches_are_equal(packed, flip):
    resident = read_batches(BatchLoader(memory(), 3, 10, CPU, "device", flip))
    for store in (memory(), packed):
        for workers in (1, 3):
            assert torch.equal(read_batches(BatchLoader(store, 3, 10, CPU, "stream", flip, workers)), resident)
    assert not torch.equal(read_batches(BatchLoader(memory(), 4, 10, CPU, "device", flip)), resident)


def test_epoch_contains_every_image_once(packed):
    images = read_batches(BatchLoader(packed, 0, 37, CPU, "stream"), batches=3, batch=37)
    for epoch in images:
        assert sorted(image.numpy().tobytes() for image in epoch) == sorted(image.tobytes() for image in IMAGES)
    assert not torch.equal(images[0], images[1])


def test_any_position_can_be_read(packed):
    whole = read_batches(BatchLoader(packed, 1, 10, CPU, "stream", flip=True))
    assert torch.equal(
        read_batches(BatchLoader(packed, 1, 10, CPU, "stream", flip=True), batches=5, start=70), whole[7:]
    )
    loader = BatchLoader(packed, 1, 10, CPU, "stream", flip=True)
    for number in (0, 1, 5, 5, 2, 3, 11, 0):  # forwards and backwards, while others are being read
        assert torch.equal(loader.get(10 * number), whole[number])
    loader.close()


@pytest.mark.parametrize("place", ["device", "stream"])
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_split_each_batch(packed, place, world_size):
    whole = read_batches(BatchLoader(packed, 2, 10, CPU, place, flip=True))
    parts = [
        read_batches(BatchLoader(packed, 2, 10, CPU, place, flip=True, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    with pytest.raises(ValueError, match="evenly"):
        BatchLoader(packed, 2, 10, CPU, rank=0, world_size=3)


def test_half_of_the_images_are_mirrored_per_epoch():
    count = 4000
    store = MemoryStore(torch.arange(4, dtype=torch.uint8).repeat(count, 1, 1, 1))
    loader = BatchLoader(store, 0, count, CPU, "device", flip=True)
    epochs = [loader.get(number * count)[:, 0, 0, 0] == 3 for number in range(2)]
    for mirrored in epochs:
        assert abs(mirrored.float().mean() - 0.5) < 0.04
    assert 0.4 < (epochs[0] == epochs[1]).float().mean() < 0.6
    assert torch.equal(BatchLoader(store, 0, count, CPU, "device").get(0), store.tensor())  # off by default


def test_flips_depend_on_the_seed(packed):
    plain, mirrored = (read_batches(BatchLoader(packed, 5, 10, CPU, "stream", flip)) for flip in (False, True))
    flips = ShuffledOrder(len(packed), 5).flips(0, 120).reshape(12, 10)
    assert torch.equal(mirrored, torch.where(flips[..., None, None, None], plain.flip(-1), plain))


def test_close_stops_the_threads(packed):
    before = threading.active_count()
    loader = BatchLoader(packed, 0, 10, CPU, "stream", workers=3)
    loader.get(0)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


class CountingStore(ImageStore):
    """Counts reads, and how many run at once."""

    checksum = ""

    def __init__(self):
        self.shape = IMAGES.shape
        self.reads, self.running, self.max_running = 0, 0, 0
        self.lock = threading.Lock()

    def read(self, indices, out):
        with self.lock:
            self.reads, self.running = self.reads + 1, self.running + 1
            self.max_running = max(self.max_running, self.running)
        out[:] = IMAGES[indices]
        with self.lock:
            self.running -= 1

    def tensor(self):
        raise AssertionError("a stream must not read all images")


def test_readahead_is_bounded():
    store = CountingStore()
    loader = BatchLoader(store, 0, 10, CPU, "stream", workers=3)
    for number in range(50):
        loader.get(10 * number)
    loader.close()
    assert 50 <= store.reads <= 50 + 3 + 2
    assert store.max_running <= 3


class BrokenStore(CountingStore):
    def read(self, indices, out):
        raise OSError(5, "Input/output error", "a.pack")


def test_read_error_is_raised():
    loader = BatchLoader(BrokenStore(), 0, 10, CPU, "stream")
    with pytest.raises(OSError, match="Input/output"):
        loader.get(0)
    loader.close()


class SlowStore(CountingStore):
    """Returns the last image late, like a slow disk."""

    def read(self, indices, out):
        out[:-1] = IMAGES[indices[:-1]]
        time.sleep(0.05)
        out[-1] = IMAGES[indices[-1]]


def test_restart_waits_for_running_reads():
    whole = read_batches(BatchLoader(memory(), 0, 10, CPU, "device"))
    loader = BatchLoader(SlowStore(), 0, 10, CPU, "stream", workers=2)
    for number in (0, 7, 3, 9):
        assert torch.equal(loader.get(10 * number), whole[number])
    loader.close()


def test_reading_continues_after_an_error():
    class FailsOnce(CountingStore):
        def read(self, indices, out):
            if self.reads == 0:
                self.reads = 1
                raise OSError(5, "Input/output error", "a.pack")
            out[:] = IMAGES[indices]

    loader = BatchLoader(FailsOnce(), 0, 10, CPU, "stream", workers=1)
    with pytest.raises(OSError, match="Input/output"):
        loader.get(0)
    assert torch.equal(loader.get(50), BatchLoader(memory(), 0, 10, CPU, "device").get(50))
    loader.close()


def test_large_stores_are_streamed(monkeypatch, packed):
    monkeypatch.setattr("dualmcmc.data.loader.available_memory", lambda device: 2 * IMAGES.nbytes)
    assert fits(packed, CPU)
    assert BatchLoader(packed, 0, 5, CPU).resident
    monkeypatch.setattr("dualmcmc.data.loader.available_memory", lambda device: 2 * IMAGES.nbytes - 2)
    assert not fits(packed, CPU)
    loader = BatchLoader(packed, 0, 5, CPU)
    assert not loader.resident
    loader.close()


def test_batch_larger_than_the_dataset(packed):
    loader = BatchLoader(packed, 0, 100, CPU, "stream")
    assert torch.equal(loader.get(100), BatchLoader(memory(), 0, 100, CPU, "device").get(100))
    loader.close()
    assert np.array_equal(IMAGES, packed.tensor().numpy())


def test_order_is_a_new_permutation_per_epoch():
    order = ShuffledOrder(10, seed=1)
    first, second = order.indices(0, 10), order.indices(10, 10)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_order_does_not_depend_on_how_it_is_read():
    whole = ShuffledOrder(7, seed=2).indices(0, 40)
    pieces = torch.cat([ShuffledOrder(7, seed=2).indices(start, 5) for start in range(0, 40, 5)])
    assert torch.equal(whole, pieces)
    assert torch.equal(ShuffledOrder(7, seed=2).indices(1, 11), whole[1:12])  # longer than an epoch
    assert not torch.equal(whole, ShuffledOrder(7, seed=3).indices(0, 40))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streaming_to_a_gpu_is_asynchronous(packed):
    device = torch.device("cuda")
    resident = read_batches(BatchLoader(memory(), 3, 10, device, "device", True), batches=200)
    loader = BatchLoader(packed, 3, 10, device, "stream", True)
    loader.get(0)
    busy = torch.randn(4000, 4000, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        streamed = []
        for number in range(200):
            for _ in range(3):
                busy = busy @ busy * 1e-4
            streamed.append(loader.get(10 * number))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loader.close()
    assert torch.equal(torch.stack(streamed), resident)
