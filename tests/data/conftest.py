from dataclasses import replace

import pytest

from dualmcmc.data import catalog, download
from dualmcmc.data.source import ImageChecksum
from tests.data.server import TEST, TRAIN, Server


@pytest.fixture
def server(monkeypatch):
    """A file server; downloads retry without a pause."""
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    server = Server()
    yield server
    server.close()


def checksum(images):
    checksum = ImageChecksum()
    for image in images:
        checksum.add(image.transpose(2, 0, 1))
    return checksum.checksum


@pytest.fixture
def small_mnist(monkeypatch, server):
    """MNIST, but with TRAIN and TEST as its published images, from the file server; npm is not installed."""
    files = {"train-images-idx3-ubyte.gz": None, "t10k-images-idx3-ubyte": None}
    dataset = replace(
        catalog.CATALOG["mnist"],
        splits={"train": len(TRAIN), "test": len(TEST)},
        checksums={"train": checksum(TRAIN), "test": checksum(TEST)},
        official=catalog._remote_files((server.url,), files),
        package=catalog.Package("npm", "small-mnist@1.0.0"),
    )
    monkeypatch.setitem(catalog.CATALOG, "mnist", dataset)
    monkeypatch.setenv("PATH", "")
    return dataset
