"""A network as the engine runs it: in a precision, so many samples at once, compiled or as it is.

The method sees a module like any other. Underneath, each call is a pure function of weights and input:
the weights are worked out first (spectral norm, folded pooling), then the bare layers run with them. So a
chain works them out once, and what runs thirty times is the layers alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from dualmcmc.nets.batchnorm import BatchNorm2d
from dualmcmc.nets.blocks import Conv2d, ConvTranspose2d
from dualmcmc.nets.frozen import frozen, not_iterating

LOWERED = (Conv2d, ConvTranspose2d)  # layers that may compute in a coarser type than float32
Tensors = dict[str, Tensor]
Layers = Callable[[Tensors, Tensors, Tensor], Any]  # (weights, buffers, x) -> what the network gives
Compiler = Callable[[Layers], Layers]


class Purpose(Enum):
    """What a network is evaluated for: each is compiled on its own."""

    LEARNING = auto()  # a loss, with gradients of the weights
    CHAIN = auto()  # held still, with gradients of the input
    STILL = auto()  # held still, a value alone


class Evaluator(nn.Module):
    """Runs `net` with the weights it has at the time; gradients reach net's own parameters.

    `bare`: the same layers without parametrisations, of which only the structure is used.
    `dtype`: what convolutions compute in. Parameters, and all that comes in and goes out, stay as they are.
    `at_once`: samples evaluated together, None for all. Activations are then kept of one part only: a chain
    takes its parts one after the other, a loss evaluates them again for its gradient.
    `compiler`: for what is asked for ahead (`compile_ahead`). All else runs as it is: a compiler takes long, and is not
    to begin in the middle of other work.
    """

    def __init__(
        self,
        net: nn.Module,
        bare: nn.Module,
        dtype: torch.dtype = torch.float32,
        at_once: int | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__()
        self.at_once = at_once
        self._nets = (net,)  # in a tuple: its parameters are not this module's
        bare = _in_the_mode_of(net, copy.deepcopy(bare).to(next(net.parameters()).device).requires_grad_(False))
        self._names = [name for name, _ in bare.named_parameters()]
        self._tracked = [name for name in bare.state_dict() if name not in self._names]  # BatchNorm's statistics
        for parameter in bare.parameters():
            parameter.data = parameter.new_empty(0)
        self._lower = _lowering(net, self._names, dtype)
        self._plain = _layers(bare, self._lower), _layers(_without_tracking(bare), self._lower)
        self._learn, self._chain = self._plain if compiler is None else map(compiler, self._plain)
        self._held: tuple[Tensors, Tensors] | None = None
        self._again = False
        self._ready: set[tuple[Purpose, int]] = set()  # compiled: for what, and how many samples at once

    def forward(self, x: Tensor) -> Any:
        """net(x)."""
        x = x.contiguous()  # one layout of inputs: one compilation
        parts = x.split(self.at_once or len(x))
        if self._held is not None:
            return _joined([self._still_layers(part)(*self._held, part) for part in parts])
        weights, buffers = self._weights(), self._statistics()
        if len(parts) == 1:
            return self._learning_layers(x)(weights, buffers, x)
        return _joined([self._part(weights, buffers, part) for part in parts])

    @contextmanager
    def frozen(self) -> Iterator[Callable[[Tensor], Any]]:
        """Hold the network still (see `nets.frozen.frozen`): its weights are worked out here, once."""
        if self._held is not None:
            yield self
            return
        with torch.no_grad(), frozen(self._nets[0]):
            # Detached: compiled layers work out every gradient that anything given to them asks for.
            weights = {name: weight.detach() for name, weight in self._weights().items()}
            self._held = self._lower(weights), self._statistics()
        try:
            yield self
        finally:
            self._held = None

    def give_up_compiling(self) -> None:
        """From now on, run the layers as they are."""
        self._learn, self._chain = self._plain

    def compile_ahead(self, purpose: Purpose, x: Tensor) -> None:
        """Have compiled what inputs like `x` need for this purpose. Changes nothing."""
        for part in x.split(self.at_once or len(x)):
            if (purpose, len(part)) not in self._ready:
                self._ready.add((purpose, len(part)))
                self._try_out(purpose, part)

    def is_ready(self, purpose: Purpose, x: Tensor) -> bool:
        """Whether inputs like `x` find everything compiled."""
        return all((purpose, len(part)) in self._ready for part in x.split(self.at_once or len(x)))

    def _try_out(self, purpose: Purpose, x: Tensor) -> None:
        net = self._nets[0]
        if purpose is Purpose.LEARNING:
            with not_iterating(net):
                weights, spare = self._weights(), {name: value.clone() for name, value in self._statistics().items()}
            _slope(self._learn(weights, spare, x), list(net.parameters()))
            return
        with self.frozen():
            if purpose is Purpose.CHAIN:
                leaf = x.detach().requires_grad_()
                _slope(self(leaf), [leaf])
            else:
                with torch.no_grad():
                    self(x)

    def _learning_layers(self, x: Tensor) -> Layers:
        ready = torch.is_grad_enabled() and (Purpose.LEARNING, len(x)) in self._ready
        return self._learn if ready else self._plain[0]

    def _still_layers(self, x: Tensor) -> Layers:
        purpose = Purpose.CHAIN if torch.is_grad_enabled() and x.requires_grad else Purpose.STILL
        return self._chain if (purpose, len(x)) in self._ready else self._plain[1]

    def _weights(self) -> Tensors:
        """What the bare layers need, from net's parameters: normalised, pooling folded in."""
        found = {}
        for name in self._names:
            path, _, leaf = name.rpartition(".")
            layer = self._nets[0].get_submodule(path)
            found[name] = layer.kernel() if leaf == "weight" and isinstance(layer, Conv2d) else getattr(layer, leaf)
        return found

    def _statistics(self) -> Tensors:
        return {name: self._nets[0].get_buffer(name) for name in self._tracked}

    def _part(self, weights: Tensors, buffers: Tensors, x: Tensor) -> Any:
        """A part of a batch, of which no activations are kept: its gradient evaluates it again."""
        layers = self._learning_layers(x)
        if not torch.is_grad_enabled():
            return layers(weights, buffers, x)

        def evaluate(x: Tensor) -> Any:
            spare = {name: value.clone() for name, value in buffers.items()} if self._again else buffers
            return layers(weights, spare, x)

        contexts = nullcontext(), self._repeating()
        return checkpoint(evaluate, x, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """While a part is evaluated again: its statistics have been counted."""
        self._again = True
        try:
            yield
        finally:
            self._again = False


def _joined(parts: list[Any]) -> Any:
    """What a network gave for the parts of a batch, as if for the whole: a tensor, or several."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))


@contextmanager
def uncompiled(nets: nn.Module) -> Iterator[None]:
    """For a while, run the layers of every Evaluator inside `nets` as they are."""
    inside = [(net, net._learn, net._chain) for net in nets.modules() if isinstance(net, Evaluator)]
    for net, _, _ in inside:
        net.give_up_compiling()
    try:
        yield
    finally:
        for net, learn, chain in inside:
            net._learn, net._chain = learn, chain


def _layers(bare: nn.Module, lower: Callable[[Tensors], Tensors]) -> Layers:
    """The layers of a network as a function of their weights."""

    def evaluate(weights: Tensors, buffers: Tensors, x: Tensor) -> Any:
        # Lowered here and not before: the gradients of several parts then add up in float32.
        given = functional_call(bare, (lower(weights), buffers), (x,))
        return given.contiguous() if isinstance(given, Tensor) else given  # one layout of images: one compilation

    return evaluate


def _lowering(net: nn.Module, names: list[str], dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    """What puts the weights of convolutions into the type and the order they compute in; a second time is free."""
    lowered = {name for name in names if isinstance(net.get_submodule(name.rpartition(".")[0]), LOWERED)}

    def to_layout(weight: Tensor) -> Tensor:
        weight = weight.to(dtype)
        return weight.contiguous(memory_format=torch.channels_last) if weight.ndim == 4 else weight  # or a bias

    def lower(weights: Tensors) -> Tensors:
        return {name: to_layout(weight) if name in lowered else weight for name, weight in weights.items()}

    return lower


def _in_the_mode_of(net: nn.Module, bare: nn.Module) -> nn.Module:
    """`bare`, training or not and BatchNorm tracking or not as the same layers of `net` do."""
    for name, module in bare.named_modules():
        like = net.get_submodule(name)
        module.training = like.training
        if isinstance(module, _BatchNorm) and isinstance(like, _BatchNorm):
            module.track_running_stats = like.track_running_stats
        if isinstance(module, BatchNorm2d) and isinstance(like, BatchNorm2d):
            module.across = like.across
    return bare


def _without_tracking(bare: nn.Module) -> nn.Module:
    """The same layers, leaving BatchNorm's running statistics as they are."""
    bare = copy.deepcopy(bare)
    for module in bare.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.track_running_stats = False
    return bare


def _slope(given: Any, leaves: list[Tensor]) -> None:
    """A gradient of what a network gave, for nothing but the code that works it out."""
    outputs = [given] if isinstance(given, Tensor) else list(given)
    torch.autograd.grad([output.sum() for output in outputs], leaves, allow_unused=True)
