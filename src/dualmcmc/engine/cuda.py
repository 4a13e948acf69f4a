"""CUDA graphs and streams."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from dualmcmc.methods import Lane
from dualmcmc.utils.errors import UserError, first_line

WARMUP_RUNS = 3  # before capture: kernels are compiled and selected, libraries allocate workspaces
WARMUP_RUNS_DDP = 11  # DDP records its first iterations (PyTorch's notes on CUDA graphs)
MAX_LANES = 3


class CudaGraph:
    """`function`, captured after a few warm-up runs and replayed from then on.

    It must read and write the same tensors each time and draw from `generators` and CUDA's default generator alone.
    Generators advance exactly as if every run had been launched from Python, so their states can be saved at any time.
    `ddp`: it averages gradients over processes.
    """

    def __init__(
        self, function: Callable[[], object], device: torch.device, *generators: torch.Generator, ddp: bool = False
    ) -> None:
        self._function, self._device, self._generators, self._ddp = function, device, generators, ddp
        self._runs = 0
        self._capture_stream = torch.cuda.Stream(device)  # capture is not allowed on the default stream
        self._graph: torch.cuda.CUDAGraph | None = None

    def recapture(self) -> CudaGraph:
        """The same function, to be captured again because a constant it contains has changed."""
        return CudaGraph(self._function, self._device, *self._generators, ddp=self._ddp)

    def __call__(self) -> None:
        """Run once."""
        if self._graph is None and self._runs >= (WARMUP_RUNS_DDP if self._ddp else WARMUP_RUNS):
            self._graph = self._capture()
        if self._graph is not None:
            self._graph.replay()
            return
        self._runs += 1
        self._capture_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._capture_stream):
            self._function()
        torch.cuda.current_stream(self._device).wait_stream(self._capture_stream)

    def _capture(self) -> torch.cuda.CUDAGraph:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the graph has a memory pool of its own
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        try:
            # thread_local: reader threads may wait for their own copies meanwhile
            with torch.cuda.graph(graph, stream=self._capture_stream, capture_error_mode="thread_local"):
                self._function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's generators are unusable after a failed capture
            if isinstance(error.__context__, torch.OutOfMemoryError):  # hidden by the end of the capture
                raise error.__context__ from None
            raise UserError(
                f"cannot capture an iteration as a CUDA graph ({first_line(error)}): add engine.mode=eager."
            ) from None
        return graph


class StreamLanes:
    """Lanes (see `methods.sequential`) on CUDA streams: small kernels of independent blocks share the GPU.

    The host still executes the blocks in order, so random numbers are drawn as in eager mode. Tensors used in a lane
    must outlive the outer block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side_streams = [torch.cuda.Stream(device) for _ in range(MAX_LANES - 1)]
        # A network may run on one stream and later on another. Autograd synchronises correctly; recent torch also
        # warns, and the warning can only be disabled globally.
        warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if warn is not None:
            warn(False)

    @contextmanager
    def __call__(self) -> Iterator[Lane]:
        """Every lane starts from here; the block ends when all have finished."""
        main = torch.cuda.current_stream(self._device)
        start = main.record_event()
        free, used = [main, *self._side_streams], []

        def lane() -> AbstractContextManager[object]:
            stream = free.pop(0)
            if stream is not main:
                stream.wait_event(start)
                used.append(stream)
            return torch.cuda.stream(stream)

        yield lane
        for stream in used:
            main.wait_stream(stream)
