"""What the published weights' samples are held against: CIFAR-10's training images, seen in blocks of 4x4 pixels.

`python -m tests.published.reference` makes the file again, from CIFAR-10 in the cache folder.
"""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualmcmc import data, settings
from dualmcmc.metrics.frechet import Moments

FILE = Path(__file__).parent / "cifar10-blocks.safetensors"


def features(images: Tensor) -> Tensor:
    """(N, 3, 32, 32) bytes to (N, 256): the colour of each block, and how much its grey varies; pixels in [0, 1].

    Colours show whether pictures are laid out as photographs are, the spread whether they are as sharp.
    """
    blocks = images.double().div(255).unfold(2, 4, 4).unfold(3, 4, 4).flatten(-2)  # (N, 3, 8, 8, 16)
    return torch.cat([blocks.mean(-1).flatten(1), blocks.mean(1).std(-1).flatten(1)], 1)


def training_images() -> Moments:
    """Worked out from the images themselves."""
    store = data.load(settings.load_config("cifar10-simple").data).train
    return Moments.of(features(store.first(len(store))))


@cache
def reference() -> Moments:
    """The same, as stored."""
    stored = load_file(FILE)
    return Moments.known(50_000, stored["mean"], stored["covariance"])


if __name__ == "__main__":
    moments = training_images()
    save_file({"mean": moments.mean.float(), "covariance": moments.covariance.float()}, FILE)
