"""Batches are a function of the seed and the place in the walk, wherever the images lie."""

import threading
import time

import numpy as np
import pytest
import torch

from dualmcmc.data import pack
from dualmcmc.data.feed import Feed, fits
from dualmcmc.data.order import Order
from dualmcmc.data.store import Memory, Store
from tests.data.makers import pixels

CPU = torch.device("cpu")
IMAGES = pixels(37, 8).transpose(0, 3, 1, 2).copy()


def memory():
    return Memory(torch.from_numpy(IMAGES))


@pytest.fixture
def packed(tmp_path):
    pack.write(tmp_path / "a.pack", {"train": IMAGES}, (3, 8, 8), {})
    return pack.read(tmp_path / "a.pack")[0]["train"]


def walk(feed, batches=12, batch=10, start=0):
    got = [feed.get(start + number * batch).clone() for number in range(batches)]
    feed.close()
    return torch.stack(got)


@pytest.mark.parametrize("flip", [False, True])
def test_streaming_gives_what_memory_gives(packed, flip):
    resident = walk(Feed(memory(), 3, 10, CPU, "device", flip))
    for store in (memory(), packed):
        for workers in (1, 3):
            assert torch.equal(walk(Feed(store, 3, 10, CPU, "stream", flip, workers)), resident)
    assert not torch.equal(walk(Feed(memory(), 4, 10, CPU, "device", flip)), resident)


def test_an_epoch_sees_every_image_once(packed):
    images = walk(Feed(packed, 0, 37, CPU, "stream"), batches=3, batch=37)
    for epoch in images:
        assert sorted(image.numpy().tobytes() for image in epoch) == sorted(image.tobytes() for image in IMAGES)
    assert not torch.equal(images[0], images[1])


def test_a_walk_goes_on_from_anywhere(packed):
    whole = walk(Feed(packed, 1, 10, CPU, "stream", flip=True))
    assert torch.equal(walk(Feed(packed, 1, 10, CPU, "stream", flip=True), batches=5, start=70), whole[7:])
    feed = Feed(packed, 1, 10, CPU, "stream", flip=True)
    for number in (0, 1, 5, 5, 2, 3, 11, 0):  # there and back, while others are being read
        assert torch.equal(feed.get(10 * number), whole[number])
    feed.close()


@pytest.mark.parametrize("place", ["device", "stream"])
@pytest.mark.parametrize("world", [2, 5])
def test_processes_share_a_batch_without_overlap(packed, place, world):
    whole = walk(Feed(packed, 2, 10, CPU, place, flip=True))
    parts = [walk(Feed(packed, 2, 10, CPU, place, flip=True, rank=rank, world=world)) for rank in range(world)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    with pytest.raises(ValueError, match="evenly"):
        Feed(packed, 2, 10, CPU, rank=0, world=3)


def test_half_of_the_images_are_mirrored_anew_each_epoch():
    count = 4000
    store = Memory(torch.arange(4, dtype=torch.uint8).repeat(count, 1, 1, 1))
    feed = Feed(store, 0, count, CPU, "device", flip=True)
    epochs = [feed.get(number * count)[:, 0, 0, 0] == 3 for number in range(2)]
    for mirrored in epochs:
        assert abs(mirrored.float().mean() - 0.5) < 0.04
    assert 0.4 < (epochs[0] == epochs[1]).float().mean() < 0.6
    assert torch.equal(Feed(store, 0, count, CPU, "device").get(0), store.tensor())  # off by default


def test_mirroring_follows_the_seed(packed):
    plain, mirrored = (walk(Feed(packed, 5, 10, CPU, "stream", flip)) for flip in (False, True))
    coins = Order(len(packed), 5).flips(0, 120).reshape(12, 10)
    assert torch.equal(mirrored, torch.where(coins[..., None, None, None], plain.flip(-1), plain))


def test_closing_lets_the_threads_go(packed):
    before = threading.active_count()
    feed = Feed(packed, 0, 10, CPU, "stream", workers=3)
    feed.get(0)
    assert threading.active_count() > before
    feed.close()
    assert threading.active_count() == before


class Watched(Store):
    """Counts what is read, and how much at once."""

    def __init__(self):
        self.shape = IMAGES.shape
        self.checksum_ = ""
        self.reads, self.now, self.most = 0, 0, 0
        self.lock = threading.Lock()

    checksum = property(lambda self: self.checksum_)

    def read(self, indices, out):
        with self.lock:
            self.reads, self.now = self.reads + 1, self.now + 1
            self.most = max(self.most, self.now)
        out[:] = IMAGES[indices]
        with self.lock:
            self.now -= 1

    def tensor(self):
        raise AssertionError("a stream must never ask for everything")


def test_a_stream_reads_a_few_batches_ahead_and_no_more():
    store = Watched()
    feed = Feed(store, 0, 10, CPU, "stream", workers=3)
    for number in range(50):
        feed.get(10 * number)
    feed.close()
    assert 50 <= store.reads <= 50 + 3 + 2
    assert store.most <= 3


class Broken(Watched):
    def read(self, indices, out):
        raise OSError(5, "Input/output error", "a.pack")


def test_an_error_in_a_worker_reaches_the_run():
    feed = Feed(Broken(), 0, 10, CPU, "stream")
    with pytest.raises(OSError, match="Input/output"):
        feed.get(0)
    feed.close()


class Slow(Watched):
    """Writes its last image late, as a slow disk would."""

    def read(self, indices, out):
        out[:-1] = IMAGES[indices[:-1]]
        time.sleep(0.05)
        out[-1] = IMAGES[indices[-1]]


def test_a_restart_waits_for_reads_under_way():
    whole = walk(Feed(memory(), 0, 10, CPU, "device"))
    feed = Feed(Slow(), 0, 10, CPU, "stream", workers=2)
    for number in (0, 7, 3, 9):
        assert torch.equal(feed.get(10 * number), whole[number])
    feed.close()


def test_after_an_error_elsewhere_in_the_file_the_rest_can_be_read():
    class Hurt(Watched):
        def read(self, indices, out):
            if self.reads == 0:
                self.reads = 1
                raise OSError(5, "Input/output error", "a.pack")
            out[:] = IMAGES[indices]

    feed = Feed(Hurt(), 0, 10, CPU, "stream", workers=1)
    with pytest.raises(OSError, match="Input/output"):
        feed.get(0)
    assert torch.equal(feed.get(50), Feed(memory(), 0, 10, CPU, "device").get(50))
    feed.close()


def test_what_does_not_fit_is_streamed(monkeypatch, packed):
    monkeypatch.setattr("dualmcmc.data.feed.available_memory", lambda device: 2 * IMAGES.nbytes)
    assert fits(packed, CPU)
    assert Feed(packed, 0, 5, CPU).resident
    monkeypatch.setattr("dualmcmc.data.feed.available_memory", lambda device: 2 * IMAGES.nbytes - 2)
    assert not fits(packed, CPU)
    feed = Feed(packed, 0, 5, CPU)
    assert not feed.resident
    feed.close()


def test_a_batch_may_be_larger_than_the_set(packed):
    feed = Feed(packed, 0, 100, CPU, "stream")
    assert torch.equal(feed.get(100), Feed(memory(), 0, 100, CPU, "device").get(100))
    feed.close()
    assert np.array_equal(IMAGES, packed.tensor().numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streaming_to_a_gpu_never_waits_and_never_mixes(packed):
    device = torch.device("cuda")
    resident = walk(Feed(memory(), 3, 10, device, "device", True), batches=200)
    feed = Feed(packed, 3, 10, device, "stream", True)
    feed.get(0)
    busy = torch.randn(4000, 4000, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        streamed = []
        for number in range(200):
            for _ in range(3):
                busy = busy @ busy * 1e-4
            streamed.append(feed.get(10 * number))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    feed.close()
    assert torch.equal(torch.stack(streamed), resident)
