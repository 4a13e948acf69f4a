"""The layers of a network as a pure function of their weights, in a given precision.

A network computes its weights (spectral norm, folded pooling) and applies its layers; here the two are separate, so
that a chain can compute the weights once. Convolutions have a form that is fast in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from dualmcmc.nets.blocks import PooledConv2d
from dualmcmc.nets.frozen import spectral_norm_hooks

IMAGE_CHANNELS = 4  # a tensor with no more channels is an image, not features
Tensors = dict[str, Tensor]
Layers = Callable[[Tensors, Tensors, Tensor], Any]  # (weights, buffers, x) -> the network's output


@dataclass(frozen=True)
class BareLayers:
    """The layers of a network with empty weights, as data that another process can receive."""

    module: nn.Module
    convolutions: frozenset[str]  # their parameters, which are cast
    dtype: torch.dtype  # of the convolutions

    def cast(self, weights: Tensors) -> Tensors:
        """Convolution weights in `dtype` and channels-last; idempotent."""
        return {name: self._cast(weight) if name in self.convolutions else weight for name, weight in weights.items()}

    def _cast(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.dtype)
        return weight.contiguous(memory_format=torch.channels_last) if weight.ndim == 4 else weight  # or a bias

    def function(self) -> Layers:
        """The layers as a function of their weights."""

        def evaluate(weights: Tensors, buffers: Tensors, x: Tensor) -> Any:
            # Cast inside, so that the gradients of several micro-batches accumulate in float32.
            output = functional_call(self.module, (self.cast(weights), buffers), (x,))
            if isinstance(output, Tensor):
                return output.to(x.dtype).contiguous()  # one output layout: one compilation
            return tuple(part.to(x.dtype) for part in output)

        return evaluate

    def without_tracking(self) -> BareLayers:
        """A copy that updates neither BatchNorm's statistics nor the singular vectors of older spectral norms."""
        module = copy.deepcopy(self.module)
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                layer.track_running_stats = False
        for hook in spectral_norm_hooks(module):
            hook.n_power_iterations = 0
        return replace(self, module=module)


def bare_layers(net: nn.Module, dtype: torch.dtype = torch.float32) -> BareLayers:
    """The layers of `net`, with convolutions in `dtype`."""
    bare = _bare_copy(net)
    names = [name for name, _ in bare.named_parameters()]
    for parameter in bare.parameters():
        parameter.data = parameter.new_empty(0)
    convolutions = {name for name in names if _has_fast_form(net.get_submodule(name.rpartition(".")[0]))}
    return BareLayers(bare, frozenset(convolutions), dtype)


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
