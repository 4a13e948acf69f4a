"""An energy whose signal does not fade with depth.

Every layer of a spectrally normalised network shrinks typical inputs: at initialisation the slope |dE/dx| falls by a
factor of ten for every few layers, and with it everything that E can teach. `normalize_signal` sets the constant gains
of E (`blocks.Gain`) from one batch of images, once, before training: each activation has root mean square 1, as in LSUV
(Mishkin & Matas, 2016), and E has the slope that is asked for. The gains are buffers, saved with the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualmcmc.nets.blocks import Gain
from dualmcmc.nets.frozen import frozen

MICRO_BATCH = 8  # images per gradient, to save memory
TINY = 1e-12  # against division by 0, if all images are equal to 0


def mean_slope(energy: nn.Module, x: Tensor) -> Tensor:
    """The mean of |dE/dx| over images x (B, ...)."""
    norms = []
    with frozen(energy) as net:
        for part in x.detach().split(MICRO_BATCH):
            part.requires_grad_()
            (gradient,) = torch.autograd.grad(net(part).sum(), part)
            norms.append(gradient.flatten(1).norm(dim=1))
    return torch.cat(norms).mean()


def normalize_signal(energy: nn.Module, x: Tensor, slope: float) -> None:
    """Set the gains of `energy` for images x (B, ...); its mean slope on them becomes `slope`."""
    visited: list[nn.Module] = []

    def set_unit_rms(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        factor = output.float().square().mean().clamp(min=TINY).rsqrt()
        module.get_buffer("value").mul_(factor)
        visited.append(module)
        return output * factor  # later layers see what they will see in training

    gains = [module for module in energy.modules() if isinstance(module, Gain) and module.value is not None]
    hooks = [module.register_forward_hook(set_unit_rms) for module in gains]
    try:
        with torch.no_grad(), frozen(energy) as net:
            net(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not visited:
        raise ValueError("the energy has no gains to set: multiply its activations and its output by a `blocks.Gain`")
    factor = slope / mean_slope(energy, x).clamp(min=TINY)
    visited[-1].get_buffer("value").mul_(factor)  # the output's
