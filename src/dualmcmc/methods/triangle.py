"""The divergence triangle: energy, generator and inference model without MCMC.

Han, Nijkamp, Fang, Hill, Zhu and Wu, *Divergence triangle for joint training of generator model, energy-based model,
and inferential model*, CVPR 2019.

With respect to Algorithm 1 no sample is revised: the energy is contrasted with generator samples, the generator
descends the energy directly, and generator and inference model are an autoencoder of the data and of the generator's
latents.
"""

from __future__ import annotations

from torch import Tensor

from dualmcmc.config import Teaching
from dualmcmc.methods import Lanes, Losses, Method, sequential, terms
from dualmcmc.nets import Gaussian, Trio
from dualmcmc.rng import RandomSource


def triangle(trio: Trio, x: Tensor, z: Tensor, rng: RandomSource, cfg: Teaching, lanes: Lanes = sequential) -> Losses:
    """The energy's loss, and that of the autoencoder, for data x (B, ...) and prior draws z (B, d).

    With Q = p_data(x) q(z|x), P = p(z) p(x|z) and Pi = pi(x) q(z|x), generator and inference model minimise
    KL(Q || P) + KL(P || Pi), and the energy maximises KL(P || Pi) - KL(Q || Pi).
    """
    energy, generator, inference = trio.energy, trio.generator, trio.inference
    w_data, _ = terms.generator_weights(cfg)
    x_hat = generator(z)
    x_sample = terms.add_start_noise(x_hat, cfg, rng)  # p(x|z) has constant entropy
    sample_energy = terms.sample_energy(energy, x_sample, cfg, rng).mean()

    with lanes() as lane:
        with lane():
            loss_energy, energy_stats = terms.contrast(energy, x, x_sample.detach(), cfg, rng)
        with lane():
            loss_autoencoder, stats = terms.negative_elbo(generator, inference, x, w_data, cfg, rng)  # KL(Q || P)
            sample_nll = Gaussian(*inference(x_sample)).nll(z).mean()
            loss_autoencoder = loss_autoencoder + sample_energy + sample_nll  # KL(P || Pi)
    stats = energy_stats | stats | {"inference_sample_nll": sample_nll.detach()}
    return Losses(energy=loss_energy, autoencoder=loss_autoencoder, stats=stats)


METHOD = Method(triangle)
