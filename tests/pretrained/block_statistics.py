"""Statistics of CIFAR-10's training images in blocks of 4x4 pixels, to compare samples of the pretrained weights with.

`python -m tests.pretrained.block_statistics` computes the file from CIFAR-10 in the cache folder.
"""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dualmcmc import config_io, data
from dualmcmc.metrics.fid import Moments

FILE = Path(__file__).parent / "cifar10-blocks.safetensors"


def block_features(images: Tensor) -> Tensor:
    """(N, 3, 32, 32) uint8 to (N, 256): the mean colour and the luminance contrast of each block; pixels in [0, 1].

    Colours depend on the composition of an image, contrast on its sharpness.
    """
    blocks = images.double().div(255).unfold(2, 4, 4).unfold(3, 4, 4).flatten(-2)  # (N, 3, 8, 8, 16)
    return torch.cat([blocks.mean(-1).flatten(1), blocks.mean(1).std(-1).flatten(1)], 1)


@cache
def block_statistics() -> Moments:
    """The stored statistics."""
    stored = load_file(FILE)
    return Moments.from_statistics(50_000, stored["mean"], stored["covariance"])


if __name__ == "__main__":
    store = data.load(config_io.load_config("cifar10-simple").data).train
    moments = Moments.of(block_features(store.tensor()))
    save_file({"mean": moments.mean.float(), "covariance": moments.covariance.float()}, FILE)
