"""One training iteration, from the choice of its images to the EMA update, and its statistics.

The host selects what an iteration works on and never waits; the device does the rest: eagerly, compiled, or as one
CUDA graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.config import Config, Teaching
from dualmcmc.data.loader import BatchLoader
from dualmcmc.engine.compilation import compile_for_training
from dualmcmc.engine.cuda import CudaGraph, StreamLanes
from dualmcmc.engine.ddp import wrap_ddp
from dualmcmc.engine.distributed import SINGLE_PROCESS, World
from dualmcmc.engine.executor import uncompiled
from dualmcmc.engine.plan import ExecutionPlan, build_executors
from dualmcmc.engine.state import TrainState
from dualmcmc.methods import Lanes, Stats, load_method, sequential, step
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio
from dualmcmc.nets.frozen import Watched, frozen, unchanged
from dualmcmc.utils.images import as_float
from dualmcmc.utils.progress import ProgressFactory, no_progress

MAX_AHEAD = 8  # iterations the host may run ahead of a GPU: enough to keep it busy, few enough to stop quickly


class Abandoned(Exception):
    """The iteration in progress was given up between two chain steps; the state is as it was before it."""


class TrainStep:
    """Call it for one iteration. `window` collects the statistics, `plan` says how the networks run.

    `give_up` is asked before every chain step that runs from Python in a single process: if it returns true, the
    iteration raises `Abandoned`.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        loader: BatchLoader,
        plan: ExecutionPlan,
        world: World = SINGLE_PROCESS,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        self.config, self.state, self.loader, self.plan, self.world = config, state, loader, plan, world
        self.window = StatsWindow(config.train.log_every)
        self.executors = build_executors(state.trio, config, plan)
        self._give_up = give_up if world.size == 1 else None  # one of several processes cannot stop alone
        self._networks = self._interruptible(wrap_ddp(state.trio, self.executors, world))
        self._shares_noise = world.size > 1 and config.engine.shared_noise
        self._rng = rng.SharedGenerator(state.rng, world.rank, world.size) if self._shares_noise else state.rng
        self._pending: deque[torch.cuda.Event] = deque()  # the newest iterations on the device
        self._selection: tuple[Tensor, ...] = ()  # of the current batch; fixed addresses, for the CUDA graph
        self._indices: tuple[Tensor, ...] = ()  # of its images, for methods that remember; as above
        self._run: Callable[[], None] = self._update
        self._lanes: Lanes = sequential
        self._teaching = config.teaching.at(state.images)
        self._method = load_method(config.method)

    def prepare(
        self, progress: ProgressFactory = no_progress, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        """Compile, if the plan says so; `notify` receives a message if that fails."""
        if not self.plan.compiled:
            return
        with unchanged(self.state.trio):
            failure = compile_for_training(
                self.executors, self.config, self.loader.local_batch, self.state.device, progress
            )
        if failure:
            self.plan = replace(self.plan, compiled=False)
            notify(f"running eagerly: compilation failed ({failure})")
        elif self.plan.uses_cuda_graph:
            self._lanes = StreamLanes(self.state.device)
            self._run = CudaGraph(self._update, self.state.device, self.state.rng, ddp=self.world.launched)

    def reconfigure(self, config: Config) -> None:
        """Change chain, loss or optimizer settings; the compiled networks stay."""
        self.config = self.state.config = config
        self.window = StatsWindow(config.train.log_every)
        self._set_teaching(config.teaching.at(self.state.images))

    def _set_teaching(self, teaching: Teaching) -> None:
        self._teaching = teaching
        if isinstance(self._run, CudaGraph):  # it contains the settings as constants
            self._run = self._run.recapture()

    def __call__(self) -> None:
        """One iteration. Waits only if the host is `MAX_AHEAD` iterations ahead of the GPU."""
        state, batch = self.state, self.config.train.batch
        if self.world.size > 1 and not self._shares_noise:  # seeded per iteration, so it needs no saved state
            state.rng.manual_seed(rng.derive_seed(self.config.seed, rng.Stream.METHOD, state.images, self.world.rank))
        state.set_learning_rates(state.images // self.loader.count)
        teaching = self.config.teaching.at(state.images)
        if teaching != self._teaching:
            self._set_teaching(teaching)
        self._selection = _renewed(self._selection, self.loader.select(state.images))
        if state.memory:
            self._indices = _renewed(self._indices, (self.loader.indices(state.images),))
        state.ema.set_decay(state.images + batch, batch)
        with self._undone_if_abandoned():
            self._run()
        state.iteration += 1
        state.images += batch
        if state.device.type == "cuda":
            self._pending.append(torch.cuda.Event(blocking=True))
            self._pending[-1].record(torch.cuda.current_stream(state.device))
            if len(self._pending) > MAX_AHEAD:
                self._pending.popleft().synchronize()

    def _update(self) -> None:
        """The device's part; can be captured as a CUDA graph."""
        state = self.state
        x, memory = self._batch(), self._memory()
        stats = step(self._networks, state.optimizers, x, self._rng, self._teaching, self._lanes, self._method, memory)
        self.window.add(stats)
        state.ema.update()

    def _batch(self) -> Tensor:
        return as_float(self.loader.gather(*self._selection))

    def _memory(self, read_only: bool = False) -> Memory | None:
        """What the method remembers, for the current batch."""
        if not self.state.memory:
            return None
        return Memory(self.state.memory, self._indices[0], read_only, self.world.all_gather_rows)

    def _interruptible(self, networks: Trio) -> Trio:
        """`networks`, with `give_up` asked before every chain step."""
        if self._give_up is None:
            return networks
        return Trio(**{name: Watched(net, self._check) for name, net in networks.named_children()})

    def _check(self, x: Tensor) -> None:
        # A second x-chain follows the updates of G and I, which cannot be undone; a capture must not be left.
        undoable = not self._teaching.second_x_chain and not isinstance(self._run, CudaGraph)
        if undoable and self._give_up is not None and self._give_up():
            raise Abandoned

    @contextmanager
    def _undone_if_abandoned(self) -> Iterator[None]:
        """Restore what an abandoned iteration may have changed before its first update: random sources and buffers."""
        if self._give_up is None or isinstance(self._run, CudaGraph):
            yield
            return
        buffers = list(self.state.trio.buffers())
        noise, sources = self.state.rng.get_state(), rng.global_states()
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        except Abandoned:
            self.state.rng.set_state(noise)
            rng.set_global_states(sources)
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise

    def dry_run(self) -> dict[str, float]:
        """The statistics of one more iteration on the current batch, without any update and with separate noise."""
        noise, window, x = rng.make_generator(0, self.state.device), StatsWindow(), self._batch()
        z = torch.randn(len(x), self.config.teaching.latent_dim, device=x.device, generator=noise)
        cfg = replace(self._teaching, second_x_chain=False)
        with torch.no_grad(), unchanged(self.state.trio), ExitStack() as stack:
            stack.enter_context(uncompiled(self.executors))  # no compilation for this alone
            for network in self.executors.children():
                stack.enter_context(frozen(network))
            networks, memory = self._interruptible(self.executors), self._memory(read_only=True)
            window.add(self._method.evaluate(networks, x, z, noise, cfg, memory=memory).stats)
        return window.read(1, self.world)


def _renewed(current: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`new`, in the tensors of `current` if there are any."""
    if not current:
        return tuple(part.clone() for part in new)
    for old, part in zip(current, new, strict=True):
        old.copy_(part)
    return current


class StatsWindow:
    """Statistics of the newest `length` iterations, kept on the device. Only `read` synchronises."""

    def __init__(self, length: int = 1) -> None:
        self._length = length
        self._names: list[str] = []
        self._rows: Tensor | None = None  # (length, statistics), the newest last

    def add(self, stats: Stats) -> None:
        """Append one iteration, in place, so that a CUDA graph can do it."""
        values = torch.stack([value.float() for value in stats.values()])[None]
        if self._rows is None:
            self._names = list(stats)
            self._rows = values.new_zeros(self._length, values.shape[1])
        self._rows.copy_(torch.cat([self._rows[1:], values]))

    def read(self, count: int, world: World = SINGLE_PROCESS) -> dict[str, float]:
        """Means over the newest `count` iterations and all processes, and the largest energy gap."""
        assert self._rows is not None, "read() needs an iteration first"
        assert count <= self._length
        rows = world.all_reduce_(self._rows[-count:].clone()).double() / world.size
        names, values = list(self._names), rows.mean(0)
        if "energy_gap" in names:
            largest = rows[:, names.index("energy_gap")].abs().max()  # NaN if any is
            names, values = [*names, "energy_gap_max"], torch.cat([values, largest[None]])
        return dict(zip(names, values.tolist(), strict=True))
