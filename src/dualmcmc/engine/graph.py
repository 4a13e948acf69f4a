"""Work that is the same every time, as one CUDA graph: launched at once, with nothing left to the host."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from dualmcmc.errors import UserError, first_line

WARM_UP = 3  # runs before it is captured: kernels are compiled and chosen, libraries take their memory
WARM_UP_SHARED = 11  # the same with DDP inside, which watches its first runs (PyTorch's notes on CUDA graphs)


class Graphed:
    """`work` on CUDA, captured after a few runs and replayed from then on.

    It must read and write the same tensors each time, and draw from `sources` and CUDA's own source alone. These
    go on exactly as if every run had been launched from Python, so their states can be saved at any time.
    `shared`: it averages gradients with other processes.
    """

    def __init__(
        self, work: Callable[[], object], device: torch.device, *sources: torch.Generator, shared: bool = False
    ) -> None:
        self._work, self._device, self._sources, self._shared = work, device, sources, shared
        self._runs = 0
        self._aside = torch.cuda.Stream(device)  # captured work must not have run on the stream all else waits for
        self._graph: torch.cuda.CUDAGraph | None = None

    def anew(self) -> Graphed:
        """The same work, to be captured again: something that it holds fast has changed."""
        return Graphed(self._work, self._device, *self._sources, shared=self._shared)

    def __call__(self) -> None:
        """Run it once more."""
        if self._graph is None and self._runs >= (WARM_UP_SHARED if self._shared else WARM_UP):
            self._graph = self._captured()
        if self._graph is not None:
            self._graph.replay()
            return
        self._runs += 1
        self._aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._aside):
            self._work()
        torch.cuda.current_stream(self._device).wait_stream(self._aside)

    def _captured(self) -> torch.cuda.CUDAGraph:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the graph keeps memory of its own: what the first runs took goes back
        graph = torch.cuda.CUDAGraph()
        for source in self._sources:
            graph.register_generator_state(source)
        try:
            # thread_local: threads that stream images may wait for their own copies meanwhile
            with torch.cuda.graph(graph, stream=self._aside, capture_error_mode="thread_local"):
                self._work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # and torch's random sources are of no use any more: this cannot go on
            if isinstance(error.__context__, torch.OutOfMemoryError):  # what the end of the capture hides
                raise error.__context__ from None
            raise UserError(
                f"an iteration cannot be captured as a CUDA graph here ({first_line(error)}): add engine.mode=eager."
            ) from None
        return graph
