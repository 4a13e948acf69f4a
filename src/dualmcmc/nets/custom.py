"""Networks given in Python: what they must take and return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualmcmc.nets import Trio
from dualmcmc.nets.blocks import Gain
from dualmcmc.nets.frozen import frozen
from dualmcmc.utils.errors import UserError, first_line

Networks = Trio | Sequence[nn.Module]  # energy, generator, inference


def as_trio(networks: Networks) -> Trio:
    """Three modules as a `Trio`."""
    if isinstance(networks, Trio):
        return networks
    modules = list(networks) if isinstance(networks, Sequence) else [networks]
    if len(modules) != 3 or not all(isinstance(module, nn.Module) for module in modules):
        raise UserError("networks must be three torch modules: Trio(energy, generator, inference).")
    return Trio(*modules)


def describe_classes(trio: Trio) -> str:
    """The classes of the networks, as a note in the settings of a run."""
    kinds = {name: type(net) for name, net in trio.named_children()}
    return ", ".join(f"{name}: {kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items())


def has_gains(trio: Trio) -> bool:
    """Whether E has gains for `nets.energy_slope` to set."""
    return any(isinstance(module, Gain) and module.value is not None for module in trio.energy.modules())


def check_networks(trio: Trio, x: Tensor, latent_dim: int) -> None:
    """Raise `UserError` unless the networks fit samples x (B, ...) and latents (B, d). Changes no weights."""
    count = len(x)
    z = torch.zeros(count, latent_dim, device=x.device)
    energy = _evaluate(trio.energy, "energy", x)
    if not isinstance(energy, Tensor) or energy.shape not in ((count,), (count, 1)):
        raise _wrong("energy", x, energy, f"({count},) or ({count}, 1)")
    generated = _evaluate(trio.generator, "generator", z)
    if not isinstance(generated, Tensor) or generated.shape != x.shape:
        raise _wrong("generator", z, generated, str(tuple(x.shape)))
    inferred = _evaluate(trio.inference, "inference", x)
    is_pair = isinstance(inferred, (tuple, list)) and len(inferred) == 2
    if not is_pair or any(not isinstance(part, Tensor) or part.shape != z.shape for part in inferred):
        raise _wrong("inference", x, inferred, f"a mean and a log-variance, {tuple(z.shape)} each")
    for name, net in trio.named_children():
        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise UserError(f"networks.{name} has no parameters to train.")
        if not all(isinstance(value, Tensor) for value in net.state_dict().values()):
            raise UserError(f"networks.{name} has a state that is not a tensor, and could not be saved.")


def _evaluate(net: nn.Module, name: str, x: Tensor) -> Any:
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with torch.no_grad(), frozen(net) as function, torch.random.fork_rng(devices):
            return function(x)
    except Exception as error:  # a module may raise anything
        raise UserError(
            f"networks.{name} failed on inputs of shape {tuple(x.shape)}: {type(error).__name__}: {first_line(error)}."
        ) from error


def _wrong(name: str, x: Tensor, output: Any, expected: str) -> UserError:
    return UserError(
        f"networks.{name} returned {_describe(output)} for inputs of shape {tuple(x.shape)}: expected {expected}."
    )


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    if isinstance(output, (tuple, list)):
        return f"{len(output)} values ({', '.join(map(_describe, output))})"
    return type(output).__name__
