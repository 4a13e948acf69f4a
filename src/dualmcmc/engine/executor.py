"""A network as the engine runs it: in a given precision, in micro-batches, compiled or eager.

The method sees an ordinary module. Underneath, each call is a pure function of weights and input: the weights are
computed first (spectral norm, folded pooling), then the bare layers run with them. A chain therefore computes the
weights once and repeats the layers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualmcmc.engine.layers import BareLayers, Layers, Tensors, bare_layers
from dualmcmc.nets.blocks import PooledConv2d
from dualmcmc.nets.frozen import frozen, no_power_iteration

Compiler = Callable[[Layers], Layers]
Arguments = tuple[Tensors, Tensors, Tensor]  # of Layers


class Mode(Enum):
    """What a network is evaluated for. Each mode is compiled separately."""

    TRAIN = auto()  # gradients of the weights
    CHAIN = auto()  # frozen, gradients of the input
    FROZEN = auto()  # frozen, no gradients


class Executor(nn.Module):
    """Runs `net` with its current weights; gradients reach net's own parameters.

    `dtype`: precision of the convolutions. Parameters, inputs and outputs keep theirs.
    `micro_batch`: samples per evaluation, None for all. Only one part's activations are kept; the backward pass
    evaluates each part again (activation checkpointing).
    `compiler`: used by `compile_ahead`. What is not compiled ahead runs eagerly, since compilation is slow and must
    not start in the middle of other work.
    """

    def __init__(
        self,
        net: nn.Module,
        dtype: torch.dtype = torch.float32,
        micro_batch: int | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__()
        self.micro_batch = micro_batch
        self._nets = (net,)  # in a tuple, so that its parameters are not registered here
        self._bare = bare_layers(net, dtype)
        self._bare_in_chain = self._bare.without_tracking()
        self._eager = self._bare.function(), self._bare_in_chain.function()
        self._train, self._chain = self._eager if compiler is None else map(compiler, self._eager)
        bare = self._bare.module
        self._names = [name for name, _ in bare.named_parameters()]
        self._tracked = [name for name in bare.state_dict() if name not in self._names]  # BatchNorm statistics
        self._frozen_state: tuple[Tensors, Tensors] | None = None
        self._recomputing = False
        self._compiled: set[tuple[Mode, int]] = set()  # mode and batch size
        self._calls: dict[tuple[Mode, int], tuple[Mode, Tensor]] | None = None  # while they are recorded

    def forward(self, x: Tensor) -> Any:
        """net(x)."""
        x = x.contiguous().flatten().view(x.shape)  # one input layout, even of greyscale images: one compilation
        mode = self._mode(x)
        if self._calls is not None and mode is not None:
            self._calls[mode, len(x)] = mode, x
        weights, buffers = self._frozen_state or (self._weights(), self._buffers_of_net())
        parts = x.split(self.micro_batch or len(x))
        if len(parts) == 1:
            return self._layers(x)(weights, buffers, x)
        return _concat([self._checkpointed(weights, buffers, part) for part in parts])

    @contextmanager
    def frozen(self) -> Iterator[Callable[[Tensor], Any]]:
        """See `nets.frozen.frozen`; the weights are computed here, once."""
        if self._frozen_state is not None:
            yield self
            return
        with torch.no_grad(), frozen(self._nets[0]):
            # Detached: compiled layers compute every gradient that any of their inputs requires.
            weights = {name: weight.detach() for name, weight in self._weights().items()}
            self._frozen_state = self._bare.cast(weights), self._buffers_of_net()
        try:
            yield self
        finally:
            self._frozen_state = None

    @contextmanager
    def recording(self) -> Iterator[Collection[tuple[Mode, Tensor]]]:
        """During the block, collect an input of each mode and size that is evaluated."""
        self._calls = {}
        try:
            yield self._calls.values()
        finally:
            self._calls = None

    def disable_compilation(self) -> None:
        """Run eagerly from now on."""
        self._train, self._chain = self._eager

    def to_compile(self, mode: Mode, x: Tensor) -> list[Tensor]:
        """The parts of inputs like `x`, one of each size, that are not compiled for this mode."""
        parts = {len(part): part for part in x.split(self.micro_batch or len(x))}
        return [part for size, part in parts.items() if (mode, size) not in self._compiled]

    def compile_ahead(self, mode: Mode, x: Tensor) -> None:
        """Compile for this mode and inputs like `x`. Changes no state."""
        layers = self._train if mode is Mode.TRAIN else self._chain
        for part in self.to_compile(mode, x):
            trigger(layers, mode, self.arguments(mode, part))
            self._compiled.add((mode, len(part)))

    def is_compiled(self, mode: Mode, x: Tensor) -> bool:
        """Whether inputs like `x` run compiled in this mode."""
        return not self.to_compile(mode, x)

    def bare(self, mode: Mode) -> BareLayers:
        """The layers that run in this mode."""
        return self._bare if mode is Mode.TRAIN else self._bare_in_chain

    def arguments(self, mode: Mode, x: Tensor) -> Arguments:
        """What the layers are called with for `x` in this mode; buffers are copies."""
        if mode is Mode.TRAIN:
            with no_power_iteration(self._nets[0]):
                weights = self._weights()
            buffers = self._buffers_of_net()
        else:
            with self.frozen():
                assert self._frozen_state is not None
                weights, buffers = self._frozen_state
        x = x.detach().requires_grad_(mode is Mode.CHAIN)
        return weights, {name: value.clone() for name, value in buffers.items()}, x

    def _layers(self, x: Tensor) -> Layers:
        """The compiled layers if there are any for this input, else the eager ones."""
        compiled = (self._mode(x), len(x)) in self._compiled
        if self._frozen_state is None:
            return self._train if compiled else self._eager[0]
        return self._chain if compiled else self._eager[1]

    def _mode(self, x: Tensor) -> Mode | None:
        """What this evaluation is for; None if neither frozen nor with gradients."""
        if self._frozen_state is None:
            return Mode.TRAIN if torch.is_grad_enabled() else None
        return Mode.CHAIN if torch.is_grad_enabled() and x.requires_grad else Mode.FROZEN

    def _weights(self) -> Tensors:
        """The weights of the bare layers from net's parameters: normalised, pooling folded in."""
        weights = {}
        for name in self._names:
            path, _, leaf = name.rpartition(".")
            layer = self._nets[0].get_submodule(path)
            weights[name] = layer.kernel() if isinstance(layer, PooledConv2d) else getattr(layer, leaf)  # no bias
        return weights

    def _buffers_of_net(self) -> Tensors:
        return {name: self._nets[0].get_buffer(name) for name in self._tracked}

    def _checkpointed(self, weights: Tensors, buffers: Tensors, x: Tensor) -> Any:
        """A micro-batch, evaluated again in the backward pass."""
        layers = self._layers(x)
        if not torch.is_grad_enabled():
            return layers(weights, buffers, x)

        def evaluate(x: Tensor) -> Any:
            updated = {name: value.clone() for name, value in buffers.items()} if self._recomputing else buffers
            return layers(weights, updated, x)

        recompute = _Recomputation(self)  # entered once for each time a gradient is taken
        contexts = nullcontext(), recompute
        return checkpoint(evaluate, x, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)


class _Recomputation:
    """During recomputation BatchNorm's statistics are not updated a second time.

    Unlike a generator it can be entered again: a gradient of a gradient evaluates a micro-batch twice more.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        self._executor._recomputing = True

    def __exit__(self, *_: object) -> None:
        self._executor._recomputing = False


@contextmanager
def uncompiled(nets: nn.Module) -> Iterator[None]:
    """Run every Executor inside `nets` eagerly for a while."""
    executors = [(net, net._train, net._chain) for net in nets.modules() if isinstance(net, Executor)]
    for net, _, _ in executors:
        net.disable_compilation()
    try:
        yield
    finally:
        for net, train, chain in executors:
            net._train, net._chain = train, chain


def _concat(parts: list[Any]) -> Any:
    """The outputs of micro-batches as one: a tensor, or a tuple of tensors."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))


def trigger(layers: Layers, mode: Mode, arguments: Arguments) -> None:
    """Evaluate once, forward and backward, so that the compiler runs."""
    with torch.set_grad_enabled(mode is not Mode.FROZEN):
        output = layers(*arguments)
    if mode is not Mode.FROZEN:
        weights, _, x = arguments
        leaves = [x] if mode is Mode.CHAIN else [weight for weight in weights.values() if weight.requires_grad]
        outputs = [output] if isinstance(output, Tensor) else list(output)
        torch.autograd.grad([tensor.sum() for tensor in outputs], leaves, allow_unused=True)
