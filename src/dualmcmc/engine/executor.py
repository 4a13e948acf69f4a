"""A network as the engine runs it: in a given precision, in micro-batches, compiled or eager.

The method sees an ordinary module. Underneath, each call is a pure function of weights and input: the weights are
computed first (spectral norm, folded pooling), then the bare layers run with them. A chain therefore computes the
weights once and repeats the layers alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from itertools import product
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from dualmcmc.nets.blocks import PooledConv2d
from dualmcmc.nets.frozen import frozen, no_power_iteration, spectral_norm_hooks

IMAGE_CHANNELS = 4  # a tensor with no more channels is an image, not features
Tensors = dict[str, Tensor]
Layers = Callable[[Tensors, Tensors, Tensor], Any]  # (weights, buffers, x) -> the network's output
Compiler = Callable[[Layers], Layers]


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
        bare = _bare_copy(net)
        self._names = [name for name, _ in bare.named_parameters()]
        self._tracked = [name for name in bare.state_dict() if name not in self._names]  # BatchNorm statistics
        for parameter in bare.parameters():
            parameter.data = parameter.new_empty(0)
        self._cast = _weight_cast(net, self._names, dtype)
        self._eager = _as_function(bare, self._cast), _as_function(_without_tracking(bare), self._cast)
        self._train, self._chain = self._eager if compiler is None else map(compiler, self._eager)
        self._frozen_state: tuple[Tensors, Tensors] | None = None
        self._recomputing = False
        self._compiled: set[tuple[Mode, int]] = set()  # mode and batch size

    def forward(self, x: Tensor) -> Any:
        """net(x)."""
        x = x.contiguous()  # one input layout: one compilation
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
            self._frozen_state = self._cast(weights), self._buffers_of_net()
        try:
            yield self
        finally:
            self._frozen_state = None

    def disable_compilation(self) -> None:
        """Run eagerly from now on."""
        self._train, self._chain = self._eager

    def compile_ahead(self, mode: Mode, x: Tensor) -> None:
        """Compile for this mode and inputs like `x`. Changes no state."""
        for part in x.split(self.micro_batch or len(x)):
            if (mode, len(part)) not in self._compiled:
                self._compiled.add((mode, len(part)))
                self._trigger(mode, part)

    def is_compiled(self, mode: Mode, x: Tensor) -> bool:
        """Whether inputs like `x` run compiled in this mode."""
        return all((mode, len(part)) in self._compiled for part in x.split(self.micro_batch or len(x)))

    def _trigger(self, mode: Mode, x: Tensor) -> None:
        """Evaluate once, forward and backward, so that the compiler runs."""
        net = self._nets[0]
        if mode is Mode.TRAIN:
            with no_power_iteration(net):
                weights = self._weights()
                scratch = {name: value.clone() for name, value in self._buffers_of_net().items()}
            _backward(self._train(weights, scratch, x), [p for p in net.parameters() if p.requires_grad])
            return
        with self.frozen():
            if mode is Mode.CHAIN:
                leaf = x.detach().requires_grad_()
                _backward(self(leaf), [leaf])
            else:
                with torch.no_grad():
                    self(x)

    def _layers(self, x: Tensor) -> Layers:
        """The compiled layers if there are any for this input, else the eager ones."""
        if self._frozen_state is None:
            compiled = torch.is_grad_enabled() and (Mode.TRAIN, len(x)) in self._compiled
            return self._train if compiled else self._eager[0]
        mode = Mode.CHAIN if torch.is_grad_enabled() and x.requires_grad else Mode.FROZEN
        return self._chain if (mode, len(x)) in self._compiled else self._eager[1]

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

        contexts = nullcontext(), self._recompute()
        return checkpoint(evaluate, x, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)

    @contextmanager
    def _recompute(self) -> Iterator[None]:
        """During recomputation BatchNorm's statistics are not updated a second time."""
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False


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


def _bare_copy(net: nn.Module) -> nn.Module:
    """The layers of `net` without parametrizations, convolutions replaced by their fast forms."""
    root = nn.Sequential(copy.deepcopy(net))
    for module in list(root.modules()):
        if parametrize.is_parametrized(module):
            _strip_parametrizations(module)
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if _has_fast_form(child):
                setattr(parent, name, _fast_form(child))
            elif type(child) is nn.Linear:
                child.__class__ = CastingLinear
    return root[0].requires_grad_(False)


def _has_fast_form(layer: nn.Module) -> TypeGuard[nn.Conv2d | nn.ConvTranspose2d]:
    """Whether the layer is one of torch's convolutions; other subclasses may compute something else."""
    if _plain_type(layer) not in (nn.Conv2d, nn.ConvTranspose2d, PooledConv2d):
        return False
    assert isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d))
    return (
        layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not any(layer.output_padding)
    )


def _plain_type(layer: nn.Module) -> type[nn.Module]:
    """The class of a layer, without parametrizations."""
    return parametrize.type_before_parametrizations(layer) if parametrize.is_parametrized(layer) else type(layer)


def _fast_form(conv: nn.Conv2d | nn.ConvTranspose2d) -> nn.Module:
    return nn.utils.skip_init(  # initialising would draw from the global generators
        FastConv2d if isinstance(conv, nn.Conv2d) else FastConvTranspose2d,
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        bias=conv.bias is not None,
        device=conv.weight.device,
    )


def _strip_parametrizations(module: nn.Module) -> None:
    """Make a copied module plain again. (torch's `remove_parametrizations` would also change the original's class.)"""
    names = dict(module.parametrizations.items())  # type: ignore[operator, union-attr]
    device = next(module.parameters()).device
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0, device=device)))


def _without_tracking(bare: nn.Module) -> nn.Module:
    """A copy that updates neither BatchNorm's running statistics nor the singular vectors of older spectral norms."""
    bare = copy.deepcopy(bare)
    for module in bare.modules():
        if isinstance(module, _BatchNorm) and module.training:
            module.track_running_stats = False
    for hook in spectral_norm_hooks(bare):
        hook.n_power_iterations = 0
    return bare


def _as_function(bare: nn.Module, cast: Callable[[Tensors], Tensors]) -> Layers:
    """The layers as a function of their weights."""

    def evaluate(weights: Tensors, buffers: Tensors, x: Tensor) -> Any:
        # Cast inside, so that the gradients of several micro-batches accumulate in float32.
        output = functional_call(bare, (cast(weights), buffers), (x,))
        if isinstance(output, Tensor):
            return output.to(x.dtype).contiguous()  # one output layout: one compilation
        return tuple(part.to(x.dtype) for part in output)

    return evaluate


def _weight_cast(net: nn.Module, names: list[str], dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    """A function that casts convolution weights to `dtype` and channels-last; idempotent."""

    convolutions = {name for name in names if _has_fast_form(net.get_submodule(name.rpartition(".")[0]))}

    def cast_one(weight: Tensor) -> Tensor:
        weight = weight.to(dtype)
        return weight.contiguous(memory_format=torch.channels_last) if weight.ndim == 4 else weight  # or a bias

    def cast(weights: Tensors) -> Tensors:
        return {name: cast_one(weight) if name in convolutions else weight for name, weight in weights.items()}

    return cast


def _concat(parts: list[Any]) -> Any:
    """The outputs of micro-batches as one: a tensor, or a tuple of tensors."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))


def _backward(output: Any, leaves: list[Tensor]) -> None:
    outputs = [output] if isinstance(output, Tensor) else list(output)
    torch.autograd.grad([tensor.sum() for tensor in outputs], leaves, allow_unused=True)


def _match_layout(weight: Tensor, x: Tensor) -> Tensor:
    """`x` with the dtype of the weights, and channels-last if they are: kernels would copy it otherwise."""
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    return x.to(weight.dtype, memory_format=torch.channels_last if last else torch.preserve_format)


class FastConv2d(nn.Conv2d):
    """A convolution in the dtype of its weights, whatever the dtype of its input.

    With bfloat16 weights, images enter and leave as float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self._keeps_size and weight.dtype == torch.bfloat16:
            if x.dtype != weight.dtype and x.shape[1] <= IMAGE_CHANNELS:
                return convolve_image(x, weight, self.bias)
            if len(weight) <= IMAGE_CHANNELS:
                return convolve_to_image(x.to(weight.dtype), weight, self.bias)
        return F.conv2d(_match_layout(weight, x), weight, self.bias, self.stride, self.padding)

    @property
    def _keeps_size(self) -> bool:
        side, width = self.kernel_size
        return side == width and side % 2 == 1 and self.stride == (1, 1) and self.padding == (side // 2, side // 2)


class CastingLinear(nn.Linear):
    """A linear layer in the dtype of its weights: features of convolutions may be bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class FastConvTranspose2d(nn.ConvTranspose2d):
    """A transposed convolution in the dtype of its weights, whatever the dtype of its input."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        return super().forward(_match_layout(self.weight, x), output_size)


def convolve_image(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A same-size convolution of float32 images with bfloat16 weights.

    Each image enters twice, rounded and as the rounding error: one Langevin step moves a pixel by less than bfloat16
    resolves near 1. Computed as one matrix product of patches, since convolution kernels are slow on three channels.
    """
    side = weight.shape[-1]
    rounded = x.detach().to(weight.dtype)
    both = F.pad(torch.cat([rounded, (x - rounded).to(weight.dtype)], 1), [side // 2] * 4)
    height, width = x.shape[2:]
    shifts = [both[:, :, row : row + height, column : column + width] for row, column in product(range(side), repeat=2)]
    patches = torch.cat(shifts, 1).permute(0, 2, 3, 1).flatten(0, 2)  # (pixels, shifts x 2 channels)
    table = weight.repeat(1, 2, 1, 1).permute(2, 3, 1, 0).flatten(0, 2)  # (shifts x 2 channels, out_channels)
    padding = -len(table) % 8  # tensor cores need a multiple of 8
    output = F.pad(patches, (0, padding)) @ F.pad(table, (0, 0, 0, padding))
    output = output if bias is None else output + bias
    return output.unflatten(0, (len(x), height, width)).permute(0, 3, 1, 2)


def convolve_to_image(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A same-size convolution from bfloat16 features to a float32 image: the reverse of `convolve_image`.

    One matrix product gives each pixel's contributions to its neighbours, which are then summed in float32.
    """
    channels, _, side, _ = weight.shape
    height, width = x.shape[2:]
    table = weight.permute(1, 2, 3, 0).flatten(1)  # (in_channels, shifts x channels)
    table = F.pad(table, (0, -table.shape[1] % 8))  # tensor cores need a multiple of 8
    contributions = (x.permute(0, 2, 3, 1).flatten(0, 2) @ table).unflatten(0, (len(x), height, width))
    contributions = F.pad(contributions, [0, 0] + [side // 2] * 4)
    output = torch.zeros(channels, device=x.device) if bias is None else bias.float()
    for shift, (row, column) in enumerate(product(range(side), repeat=2)):
        neighbour = contributions[:, row : row + height, column : column + width]
        output = output + neighbour.narrow(3, shift * channels, channels).float()
    return output.permute(0, 3, 1, 2)
