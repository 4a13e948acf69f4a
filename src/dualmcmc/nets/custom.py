"""Networks given in Python: what they must take and return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualmcmc.config import Config
from dualmcmc.nets import Trio
from dualmcmc.nets.blocks import Gain
from dualmcmc.nets.frozen import frozen, unchanged
from dualmcmc.utils.errors import UserError, first_line

Modules = Trio | Sequence[nn.Module | None]  # energy, generator, inference; None for one that is not trained
Networks = Modules | Callable[[], Modules]  # or a function that builds them


def as_trio(networks: Networks, config: Config) -> Trio:
    """The modules that the method trains as a `Trio`.

    A function that builds them is called with torch's global generator seeded.
    """
    if callable(networks) and not isinstance(networks, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would also seed the GPU's generators
            networks = networks()
    if isinstance(networks, Trio):
        modules: list[Any] = [networks.energy, networks.generator, networks.inference]
    else:
        modules = list(networks) if isinstance(networks, Sequence) else [networks]
    if len(modules) != 3 or not all(module is None or isinstance(module, nn.Module) for module in modules):
        raise UserError(
            "networks must be three torch modules, Trio(energy, generator, inference), or a function that returns them."
        )
    named = dict(zip(("energy", "generator", "inference"), modules, strict=True))
    if missing := [name for name in config.networks if named[name] is None]:
        raise UserError(f"method={config.method} trains networks.{missing[0]}, which is None.")
    if unused := [name for name, module in named.items() if module is not None and name not in config.networks]:
        raise UserError(f"method={config.method} does not train networks.{unused[0]}: pass None in its place.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise UserError("networks must be plain modules: TorchScript cannot be frozen or compiled here.")
    return networks if type(networks) is Trio else Trio(**named)


def describe_classes(trio: Trio) -> str:
    """The classes of the networks, as a note in the settings of a run."""
    kinds = {name: type(net) for name, net in trio.named_children()}
    return ", ".join(f"{name}: {kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items())


def has_gains(trio: Trio) -> bool:
    """Whether E has gains for `nets.energy_slope` to set."""
    modules = () if trio.energy is None else trio.energy.modules()
    return any(isinstance(module, Gain) and module.value is not None for module in modules)


def copied(net: nn.Module, name: str) -> nn.Module:
    """A copy of a network."""
    try:
        return copy.deepcopy(net)
    except Exception as error:  # a module may contain anything
        raise UserError(f"networks.{name} cannot be copied: {type(error).__name__}: {first_line(error)}.") from error


def check_networks(trio: Trio, x: Tensor, latent_dim: int) -> None:
    """Raise `UserError` unless the networks fit samples x (B, ...) and latents (B, d), in the modes they are in.

    Changes no weights. The networks of a trained run may be frozen.
    """
    _check_parameters(trio)
    count = len(x)
    z = torch.randn(count, latent_dim, generator=torch.Generator().manual_seed(0)).to(x.device)
    with unchanged(trio):
        checks = {name: _Check(net, name, z if name == "generator" else x) for name, net in trio.named_children()}
        if energy := checks.get("energy"):
            fits = isinstance(energy.output, Tensor) and energy.output.shape in ((count,), (count, 1))
            energy.expect(fits, f"({count},) or ({count}, 1)")
            energy.check_gradient("E does not depend on x, so that no chain can follow it")
        if generator := checks.get("generator"):
            fits = isinstance(generator.output, Tensor) and generator.output.shape == x.shape
            generator.expect(fits, str(tuple(x.shape)))
            generator.check_gradient("g(z) does not depend on z, so that no chain can follow it")
        if inference := checks.get("inference"):
            is_pair = isinstance(inference.output, (tuple, list)) and len(inference.output) == 2
            fits = is_pair and all(isinstance(part, Tensor) and part.shape == z.shape for part in inference.output)
            inference.expect(fits, f"a mean and a log-variance, {tuple(z.shape)} each")
        for check in checks.values():
            check.evaluate_without_gradients()


def _check_parameters(trio: Trio) -> None:
    owners: dict[int, str] = {}
    for name, net in trio.named_children():
        parameters = list(net.parameters())
        if not parameters:
            raise UserError(f"networks.{name} has no parameters to train.")
        if any(parameter.dtype.is_floating_point and parameter.dtype != torch.float32 for parameter in parameters):
            raise UserError(f"networks.{name} has parameters that are not float32: call its method float().")
        if any(parameter.is_meta or parameter.is_inference() for parameter in parameters):
            raise UserError(f"networks.{name} has parameters without values or made in inference mode.")
        if not all(bool(parameter.isfinite().all()) for parameter in parameters):
            raise UserError(f"networks.{name} has weights that are not finite.")
        if not all(isinstance(value, Tensor) for value in net.state_dict().values()):
            raise UserError(f"networks.{name} has a state that is not a tensor, and could not be saved.")
        for parameter in parameters:
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise UserError(
                    f"networks.{other} and networks.{name} share parameters, but each is trained by a loss of its own: "
                    "give each a copy."
                )


def require_trainable(trio: Trio) -> None:
    """Raise `UserError` unless each network has parameters to train."""
    for name, net in trio.named_children():
        if not any(parameter.requires_grad for parameter in net.parameters()):
            raise UserError(f"networks.{name} has no parameters to train: all are frozen.")


class _Check:
    """One network evaluated as in a chain, with the gradient of its input."""

    def __init__(self, net: nn.Module, name: str, x: Tensor) -> None:
        self._net, self._name, self._given = net, name, x.detach()
        self._x = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            self.output = self._evaluate(self._x)

    def expect(self, is_right: bool, expected: str) -> None:
        """Raise `UserError` unless the output has the expected shape, is float32 and finite."""
        where = f"networks.{self._name} returned"
        if not is_right:
            raise UserError(
                f"{where} {_describe(self.output)} for inputs of shape {tuple(self._x.shape)}: expected {expected}."
            )
        for part in [self.output] if isinstance(self.output, Tensor) else self.output:
            if part.dtype != torch.float32:
                raise UserError(f"{where} {str(part.dtype).removeprefix('torch.')} for float32: expected float32.")
            if not bool(part.isfinite().all()):
                raise UserError(f"{where} values that are not finite.")

    def check_gradient(self, explanation: str) -> None:
        """Raise `UserError` unless the output has a finite gradient with respect to the input."""
        gradient = None
        if self.output.requires_grad:
            (gradient,) = torch.autograd.grad(self.output.sum(), self._x, allow_unused=True)
        if gradient is None:
            raise UserError(f"networks.{self._name} has no gradient with respect to its input: {explanation}.")
        if not bool(gradient.isfinite().all()):
            raise UserError(f"networks.{self._name} has a gradient with respect to its input that is not finite.")

    def evaluate_without_gradients(self) -> None:
        """As when statistics are read; leaves no tensors with gradients in the module, which could not be copied."""
        with torch.no_grad():
            self._evaluate(self._given.clone())

    def _evaluate(self, x: Tensor) -> Any:
        try:
            with frozen(self._net) as function:
                output = function(x)
        except Exception as error:  # a module may raise anything
            raise UserError(
                f"networks.{self._name} failed on inputs of shape {tuple(x.shape)}: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error
        if not torch.equal(x.detach(), self._given):
            raise UserError(f"networks.{self._name} changes its input in place, which the chains still need.")
        return output


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    if isinstance(output, (tuple, list)):
        return f"{len(output)} values ({', '.join(map(_describe, output))})"
    return type(output).__name__
