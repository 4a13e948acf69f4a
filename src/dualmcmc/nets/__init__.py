"""The three networks: plain torch modules."""

from __future__ import annotations

import torch
from torch import nn

from dualmcmc.config import Config
from dualmcmc.nets.blocks import add_spectral_norm, initialize
from dualmcmc.nets.energy import ResnetEnergy, SimpleEnergy
from dualmcmc.nets.generator import ResnetGenerator, SimpleGenerator, StyleGenerator
from dualmcmc.nets.inference import ConvInference, Gaussian, Prior
from dualmcmc.utils.errors import UserError, sanitize

__all__ = ["Gaussian", "Prior", "Trio", "build", "parameter_counts"]

GENERATORS = {"simple": SimpleGenerator, "resnet": ResnetGenerator, "style": StyleGenerator}


class Trio(nn.Module):
    """The three networks trained together. Any modules with these signatures will do.

    energy: (B, ...) -> (B,), E(x) = -f(x). generator: (B, d) -> (B, ...), g(z).
    inference: (B, ...) -> (mean, log_var), (B, d) each. A network that the method does not train is None.
    """

    energy: nn.Module
    generator: nn.Module
    inference: nn.Module

    def __init__(
        self,
        energy: nn.Module | None = None,
        generator: nn.Module | None = None,
        inference: nn.Module | None = None,
    ) -> None:
        super().__init__()
        for name, net in (("energy", energy), ("generator", generator), ("inference", inference)):
            setattr(self, name, net)


def build(config: Config) -> Trio:
    """The networks of a config that its method trains, initialised from its seed.

    With `nets.energy_slope`, `signal.normalize_signal` sets E's gains from a batch of images before training.
    """
    nets, data, latent_dim = config.nets, config.data, config.teaching.latent_dim
    if nets.kind == "custom":
        raise UserError(
            f"nets.kind=custom: pass the networks ({sanitize(nets.classes or 'unnamed', 200)}), "
            "in Python as networks=Trio(energy, generator, inference), on the command line as --networks."
        )
    if data.shape is not None:
        raise UserError(
            f"the networks of nets.kind={nets.kind} need square images of a supported size, such as 32, not samples "
            f"of shape {data.shape}: pass your own networks."
        )
    gain = nets.energy_slope is not None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would also seed the GPU's generators
        energy: nn.Module = (
            ResnetEnergy(data.size, data.channels, nets.energy_width, gain)
            if nets.kind == "resnet"
            else SimpleEnergy(data.size, data.channels, nets.energy_width, nets.energy_depth, gain)
        )
        generator = GENERATORS[nets.kind](data.size, data.channels, nets.generator_width, latent_dim)
        inference = ConvInference(data.size, data.channels, nets.inference_width, latent_dim)
        for net in (energy, generator, inference):
            initialize(net, nets.batchnorm_gain)
        if nets.spectral_norm:
            add_spectral_norm(energy)
    trained = {"energy": energy, "generator": generator, "inference": inference}
    return Trio(**{name: trained[name] for name in config.networks})


def parameter_counts(trio: Trio) -> dict[str, int]:
    """Trainable parameters of each network."""
    return {name: sum(p.numel() for p in net.parameters()) for name, net in trio.named_children()}
