"""A run in a few numbers, cheap enough for a laptop."""

from __future__ import annotations

from typing import Any

import torch

from dualmcmc.data import Images, describe
from dualmcmc.data.store import Memory
from dualmcmc.metrics.frechet import pixel_frechet_distance
from dualmcmc.pictures import to_uint8
from dualmcmc.tasks.reconstruct import reconstruct
from dualmcmc.tasks.run import Run, finite

MOST_PIXELS = 1024  # numbers per image: a pixel covariance beyond this says little and costs much
MOST_IMAGES = 10_000


def summarise(run: Run, images: Images) -> dict[str, Any]:
    """Fréchet distances in pixel space to held-out images, and reconstruction errors.

    Samples and real training images are counted alike, so that their distances compare. A run with
    nothing held out is measured on its training images, and says so.
    """
    store, what = images.held_out()
    test = store.first(MOST_IMAGES)
    numbers: dict[str, Any] = {"measured_on": f"{len(test)} {what}", "data": describe(run.config.data, images)}
    if test[0].numel() <= MOST_PIXELS and len(test) > 1 and what == "held-out images":
        n = min(len(images.train), MOST_IMAGES)
        start = run.sample(n, steps=0)
        revised = finite(run.revise_x(start))
        order = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(0))
        real = images.train.take(order[:n])
        numbers["samples"] = n
        numbers["fd_pixels_generator"] = pixel_frechet_distance(to_uint8(start), test)
        numbers["fd_pixels_revised"] = pixel_frechet_distance(to_uint8(revised), test)
        numbers["fd_pixels_real"] = pixel_frechet_distance(real, test)
    result = reconstruct(run, Memory(test))
    numbers["mse_inference"] = result.inference["mse"]
    numbers["mse_revised"] = result.revised["mse"]
    numbers["z_steps"] = result.steps
    return numbers
