"""One iteration of training, from the choice of its images to the moving average.

The host decides what a step works on and never waits; the device does the rest: eagerly, compiled, or as one
CUDA graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from dualmcmc import rng
from dualmcmc.config import Config
from dualmcmc.crew import ALONE, Crew
from dualmcmc.data.feed import Feed
from dualmcmc.engine.accelerate import Means, compile_for_training, evaluators
from dualmcmc.engine.average import averaged
from dualmcmc.engine.graph import Graphed
from dualmcmc.engine.state import TrainState
from dualmcmc.engine.streams import SideBySide
from dualmcmc.engine.window import Window
from dualmcmc.methods.dual_mcmc import Together, dual_mcmc, in_turn, step
from dualmcmc.nets.evaluator import uncompiled
from dualmcmc.nets.frozen import frozen
from dualmcmc.pictures import from_uint8
from dualmcmc.progress import Watch, quiet

AHEAD = 8  # iterations the host may be ahead of a GPU: enough to keep it busy, few to wait for when it must stop


class Iteration:
    """Call it to go on by one batch. `window` has the statistics, `means` says how it is computed."""

    def __init__(self, config: Config, state: TrainState, feed: Feed, means: Means, crew: Crew = ALONE) -> None:
        self.config, self.state, self.feed, self.means, self.crew = config, state, feed, means, crew
        self.window = Window(config.train.log_every)
        self.networks = evaluators(state.trio, config, means, config.engine.micro_batch)
        self._taught = averaged(state.trio, self.networks, crew)
        self._shares_noise = crew.world > 1 and config.engine.shared_noise
        self._source = rng.Share(state.rng, crew.rank, crew.world) if self._shares_noise else state.rng
        self._done: deque[torch.cuda.Event] = deque()  # by the device: its newest iterations
        self._plan: tuple[Tensor, ...] = ()  # of the newest batch, always in the same place
        self._work: Callable[[], None] = self._update
        self._together: Together = in_turn

    def prepare(self, watch: Watch = quiet, note: Callable[[str], None] = lambda text: None) -> None:
        """Compile, where that was chosen; `note` is told what cannot be had."""
        if not self.means.compiled:
            return
        refused = compile_for_training(self.networks, self.config, self.feed.share, self.state.device, watch)
        if refused:
            self.means = replace(self.means, compiled=False)
            note(f"not compiled ({refused}): going on eagerly")
        elif self.means.graphed:
            self._together = SideBySide(self.state.device)
            self._work = Graphed(self._update, self.state.device, self.state.rng, shared=self.crew.launched)

    def go_on_with(self, config: Config) -> None:
        """Other settings for the same networks, which stay compiled: of chains, losses and learning rates."""
        self.config = self.state.config = config
        self.window = Window(config.train.log_every)
        if isinstance(self._work, Graphed):
            self._work = self._work.anew()

    def __call__(self) -> None:
        """Go on by one batch; waits for nothing but what is long over, where the host is far ahead of a GPU."""
        state, batch = self.state, self.config.train.batch
        if self.crew.world > 1 and not self._shares_noise:  # noise of one's own needs no saved state
            state.rng.manual_seed(rng.derive(self.config.seed, rng.Stream.METHOD, state.images, self.crew.rank))
        state.set_learning_rates(state.images // self.feed.count)
        plan = self.feed.plan(state.images)
        if self._plan:
            for mine, new in zip(self._plan, plan, strict=True):
                mine.copy_(new)
        else:
            self._plan = tuple(part.clone() for part in plan)
        state.iteration += 1
        state.images += batch
        state.ema.set_share(state.images, batch)
        self._work()
        if state.device.type == "cuda":
            self._done.append(torch.cuda.Event(blocking=True))
            self._done[-1].record(torch.cuda.current_stream(state.device))
            if len(self._done) > AHEAD:
                self._done.popleft().synchronize()

    def _update(self) -> None:
        """The device's part, which a CUDA graph can hold."""
        state = self.state
        stats = step(self._taught, state.optimizers, self._x(), self._source, self.config.teaching, self._together)
        self.window.add(stats)
        state.ema.fold_in()

    def _x(self) -> Tensor:
        return from_uint8(self.feed.gather(*self._plan))

    def try_out(self) -> dict[str, float]:
        """The numbers of one more iteration on the newest batch, which changes nothing: the networks are held
        still, and the noise is not the run's."""
        noise, trial, x = rng.generator(0, self.state.device), Window(), self._x()
        z = torch.randn(len(x), self.config.teaching.latent_dim, device=x.device, generator=noise)
        with torch.no_grad(), ExitStack() as held:
            held.enter_context(uncompiled(self.networks))  # nothing is compiled for this alone
            for network in self.networks.children():
                held.enter_context(frozen(network))
            trial.add(dual_mcmc(self.networks, x, z, noise, self.config.teaching).stats)
        return trial.read(1, self.crew)
