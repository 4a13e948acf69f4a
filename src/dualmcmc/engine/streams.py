"""Work that does not depend on each other, side by side on a GPU: small kernels then share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST = 3


class SideBySide:
    """Runs each piece of work on a stream of its own and waits for all, on the device alone.

    The host still goes through them in order, so random numbers are drawn as if they ran one after the other. What
    they are given must stay alive until the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._others = [torch.cuda.Stream(device) for _ in range(MOST - 1)]
        # A network may be evaluated on one stream and again on another. Autograd then waits as it must; recent torch
        # also warns that this may not be meant, and can only be told for the whole process that it is.
        meant = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if meant is not None:
            meant(False)

    def __call__(self, *works: Callable[[], Any]) -> Sequence[Any]:
        """What each gives."""
        first = torch.cuda.current_stream(self._device)
        streams = [first, *self._others[: len(works) - 1]]
        for stream in streams[1:]:
            stream.wait_stream(first)
        results = []
        for stream, work in zip(streams, works, strict=True):
            with torch.cuda.stream(stream):
                results.append(work())
        for stream in streams[1:]:
            first.wait_stream(stream)
        return results
