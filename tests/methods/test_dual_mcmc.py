"""Algorithm 1 against the paper's equations, stated here a second time without the package's helpers."""

import ast
import copy
import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn

from dualmcmc.config import Chain, Teaching
from dualmcmc.methods import Optimizers, step
from dualmcmc.methods.dual_mcmc import dual_mcmc
from dualmcmc.nets import Trio
from tests.methods.plain import (
    PAPER,
    B,
    D,
    TwoHeads,
    X,
    dependencies,
    gradients,
    log_likelihood,
    log_prior,
    make_batch,
    make_trio,
    normal,
    posterior,
    seeded,
    x_chain,
    z_chain,
)


def paper_samples(trio, x, z, seed, sigma, start_noise=0.0):
    """x~ (Eq. 3) and z~ (Eq. 6) from the current parameters; without an inference model z^ is a draw of N(0, I)."""
    rng = seeded(seed)
    x_hat = trio.generator(z).detach()
    if start_noise:
        x_hat = x_hat + start_noise * normal(x_hat, rng)
    x_rev = x_chain(trio.energy, x_hat, rng)
    z_hat = normal(z, rng)
    if trio.inference is not None:
        mean, log_var = trio.inference(x)
        z_hat = (mean + log_var.exp().sqrt() * z_hat).detach()
    return x_rev, z_chain(trio.generator, z_hat, x, rng, sigma)


def log_p(trio, x, z, sigma):
    """log p_theta(x, z)."""
    return log_likelihood(trio.generator, x, z, sigma) + log_prior(z)


def log_q(trio, z, x):
    return posterior(trio.inference, x).log_prob(z)


def paper_gradients(trio, x, z, x_rev, z_rev, sigma):
    """The ascent directions, expectations as batch means."""
    directions = {
        # Eq. 7
        "energy": gradients((-trio.energy(x)).mean() - (-trio.energy(x_rev)).mean(), trio.energy),
        # Eq. 10
        "generator": gradients(
            log_p(trio, x, z_rev, sigma).mean() + log_p(trio, x_rev, z, sigma).mean(), trio.generator
        ),
    }
    if trio.inference is not None:
        # Eq. 15
        directions["inference"] = gradients(log_q(trio, z_rev, x).mean() + log_q(trio, z, x_rev).mean(), trio.inference)
    return directions


@pytest.mark.parametrize("start_noise", [0.0, 0.4])
def test_gradients_are_those_of_the_paper(start_noise):
    trio, (x, z) = make_trio(), make_batch()
    cfg = Teaching(**{**vars(PAPER), "start_noise": start_noise})
    losses = dual_mcmc(trio, x, z, torch.Generator().manual_seed(3), cfg)
    x_rev, z_rev = paper_samples(trio, x, z, 3, cfg.sigma, start_noise)
    expected = paper_gradients(trio, x, z, x_rev, z_rev, cfg.sigma)
    for name, net in trio.named_children():
        found = gradients(-getattr(losses, name), net)
        for ours, paper in zip(found, expected[name], strict=True):
            assert ours.abs().max() > 1e-3
            assert torch.allclose(ours, paper, rtol=1e-5, atol=1e-9), name


def test_each_loss_depends_on_its_own_network_only():
    trio, (x, z) = make_trio(), make_batch()
    losses = dual_mcmc(trio, x, z, None, PAPER)
    for name in ("energy", "generator", "inference"):
        assert dependencies(getattr(losses, name), trio) == {name}
    assert losses.autoencoder is None


def test_without_inference_the_z_chain_starts_at_the_prior():
    (x, z), cfg = make_batch(), replace(PAPER, z_start="prior")
    trio = make_trio("energy", "generator")
    losses = dual_mcmc(trio, x, z, seeded(3), cfg)
    expected = paper_gradients(trio, x, z, *paper_samples(trio, x, z, 3, cfg.sigma), cfg.sigma)
    assert expected.keys() == {"energy", "generator"}
    for name, paper in expected.items():
        found = gradients(-getattr(losses, name), trio.get_submodule(name))
        assert all(
            torch.allclose(ours, theirs, rtol=1e-5, atol=1e-9) for ours, theirs in zip(found, paper, strict=True)
        )
        assert dependencies(getattr(losses, name), trio) == {name}
    assert losses.inference is losses.autoencoder is None
    assert losses.stats.keys() == dual_mcmc(make_trio(), x, z, None, PAPER).stats.keys() - {
        "inference_data_nll",
        "inference_sample_nll",
    }


def test_from_the_prior_an_inference_model_is_left_alone():
    (x, z), cfg, trio = make_batch(), replace(PAPER, z_start="prior"), make_trio()
    losses = dual_mcmc(trio, x, z, seeded(3), cfg)
    without = dual_mcmc(Trio(trio.energy, trio.generator), x, z, seeded(3), cfg)
    assert losses.inference is None
    assert torch.equal(losses.generator, without.generator)


def test_weights_scale_their_terms():
    trio, (x, z) = make_trio(), make_batch()

    def losses(**changes):
        return dual_mcmc(trio, x, z, torch.Generator().manual_seed(0), Teaching(**{**vars(PAPER), **changes}))

    paper = losses()
    data = losses(generator_data_weight=1, generator_sample_weight=0).generator
    sample = losses(generator_data_weight=0, generator_sample_weight=1).generator
    assert torch.allclose(paper.generator, (data + sample) / (2 * PAPER.sigma**2))
    authors = losses(generator_data_weight=1, generator_sample_weight=50).generator
    assert torch.allclose(authors, data + 50 * sample)
    on_data = losses(inference_sample_weight=0).inference
    on_samples = losses(inference_data_weight=0).inference
    assert torch.allclose(losses(inference_sample_weight=0.1).inference, on_data + 0.1 * on_samples)
    assert torch.allclose(losses(energy_weight=3).energy, 3 * paper.energy)


def test_energy_l2():
    trio, (x, z) = make_trio(), make_batch()
    cfg = Teaching(**{**vars(PAPER), "energy_l2": 0.7, "energy_weight": 3})
    losses = dual_mcmc(trio, x, z, torch.Generator().manual_seed(3), cfg)
    x_rev, _ = paper_samples(trio, x, z, 3, cfg.sigma)
    data, sample = trio.energy(x), trio.energy(x_rev)
    plain = data.mean() - sample.mean()
    assert torch.allclose(losses.energy, 3 * (plain + 0.7 * ((data**2).mean() + (sample**2).mean())))
    assert torch.allclose(losses.stats["energy_gap"], -plain)
    # up to a constant: squared distances from -1 / (2 energy_l2) and 1 / (2 energy_l2)
    distances = 0.7 * ((data + 1 / 1.4) ** 2).mean() + 0.7 * ((sample - 1 / 1.4) ** 2).mean()
    assert torch.allclose(losses.energy, 3 * (distances - 2 * 0.7 / 1.4**2))


def make_optimizers(trio, lr=0.1):
    return Optimizers(*(torch.optim.SGD(net.parameters(), lr=lr) for net in trio.children()))


def test_step_uses_gradients_at_the_initial_parameters():
    trio, (x, _) = make_trio(), make_batch()
    start = copy.deepcopy(trio)
    seed, lr = 5, 0.1
    step(trio, make_optimizers(trio, lr), x, torch.Generator().manual_seed(seed), PAPER)
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(B, D, dtype=torch.float64, generator=rng)
    losses = dual_mcmc(start, x, z, rng, PAPER)
    for name, net in start.named_children():
        descent = gradients(getattr(losses, name), net)
        after = trio.get_submodule(name).parameters()
        for old, gradient, new in zip(net.parameters(), descent, after, strict=True):
            assert torch.allclose(new, old - lr * gradient, rtol=1e-9, atol=1e-12)


def test_second_x_chain_starts_from_the_updated_generator():
    trio, (x, _) = make_trio(), make_batch()
    start = copy.deepcopy(trio)
    chain = Chain(steps=2, step_size=0.5, temperature=0)
    cfg = Teaching(**{**vars(PAPER), "x_chain": chain, "second_x_chain": True})
    stats = step(trio, make_optimizers(trio), x, torch.Generator().manual_seed(5), cfg)
    z = torch.randn(B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for generator, steps, same in ((trio.generator, 2, True), (start.generator, 2, False), (trio.generator, 0, False)):
        x_rev = generator(z).detach()
        for _ in range(steps):  # gradient descent, the chain at temperature 0
            point = x_rev.clone().requires_grad_()
            x_rev = x_rev - 0.5 * torch.autograd.grad(start.energy(point).sum(), point)[0]
        loss = start.energy(x).mean() - start.energy(x_rev).mean()
        descent = gradients(loss, start.energy)
        updated = [
            torch.allclose(new, old - 0.1 * g)
            for old, g, new in zip(start.energy.parameters(), descent, trio.energy.parameters(), strict=True)
        ]
        assert all(updated) == same
        assert torch.allclose(stats["energy_gap"], -loss) == same


def test_gradient_norms():
    trio, (x, _) = make_trio(), make_batch()
    start = copy.deepcopy(trio)
    stats = step(trio, make_optimizers(trio), x, torch.Generator().manual_seed(5), PAPER)
    rng = torch.Generator().manual_seed(5)
    losses = dual_mcmc(start, x, torch.randn(B, D, dtype=torch.float64, generator=rng), rng, PAPER)
    for name, net in start.named_children():
        flat = torch.cat([g.flatten() for g in gradients(getattr(losses, name), net)])
        assert torch.allclose(stats[f"grad_norm_{name}"], flat.norm())


@pytest.mark.parametrize("start_noise", [0.0, 0.4])
def test_stats(start_noise):
    trio, (x, z) = make_trio(), make_batch()
    losses = dual_mcmc(
        trio, x, z, torch.Generator().manual_seed(3), Teaching(**{**vars(PAPER), "start_noise": start_noise})
    )
    x_rev, z_rev = paper_samples(trio, x, z, 3, PAPER.sigma, start_noise)
    rng = torch.Generator().manual_seed(3)
    start = trio.generator(z)
    if start_noise:
        start = start + start_noise * torch.randn(start.shape, dtype=torch.float64, generator=rng)
    slopes, state, size = [], start, PAPER.x_chain.step_size
    for _ in range(PAPER.x_chain.steps):
        state = state.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(trio.energy(state).sum(), state)
        slopes.append(gradient.flatten(1).norm(dim=1).mean())
        noise = torch.randn(start.shape, dtype=torch.float64, generator=rng)
        state = state - size * gradient + (2 * size) ** 0.5 * noise
    mean, log_var = trio.inference(x)
    z_hat = mean + (0.5 * log_var).exp() * torch.randn(mean.shape, dtype=torch.float64, generator=rng)
    constant = D / 2 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    expected = {
        "energy_data": trio.energy(x).mean(),
        "energy_sample": trio.energy(x_rev).mean(),
        "energy_gap": trio.energy(x_rev).mean() - trio.energy(x).mean(),
        "energy_slope": torch.stack(slopes).mean(),
        "reconstruction_mse": (x - trio.generator(z_rev)).square().mean(),
        "x_displacement_rms": (x_rev - start).square().flatten(1).mean(1).sqrt().mean(),
        "z_displacement_rms": (z_rev - z_hat).square().flatten(1).mean(1).sqrt().mean(),
        "inference_data_nll": -log_q(trio, z_rev, x).mean() - constant,
        "inference_sample_nll": -log_q(trio, z, x_rev).mean() - constant,
    }
    assert losses.stats.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(losses.stats[name], value), name
        assert not losses.stats[name].requires_grad


@pytest.mark.parametrize("second", [False, True])
def test_batchnorm_and_spectral_norm_update_in_training_passes_only(second):
    """Not inside a chain: two training passes of G, one of E."""
    energy = nn.utils.parametrizations.spectral_norm(nn.Linear(X, 1, bias=False))
    norm = nn.BatchNorm1d(8)
    generator = nn.Sequential(nn.Linear(D, 8), norm, nn.Linear(8, X))
    trio = Trio(nn.Sequential(energy, nn.Flatten(0)), generator, TwoHeads()).double().train()
    iterations = 0
    inner = energy.parametrizations.weight[0]
    original = inner._power_method

    def counted(*arguments):
        nonlocal iterations
        iterations += 1
        return original(*arguments)

    inner._power_method = counted
    step(trio, make_optimizers(trio), make_batch()[0], None, Teaching(**{**vars(PAPER), "second_x_chain": second}))
    assert iterations == 1
    assert norm.num_batches_tracked == 2


def test_algorithm_1_is_short_and_straight():
    source = inspect.getsource(dual_mcmc)
    assert len(source.splitlines()) <= 60
    inner = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)
    assert sum(isinstance(node, inner) for node in ast.walk(ast.parse(source))) == 1  # the function itself


def test_acceptance_rates_are_logged_for_adjusted_chains():
    trio, (x, z) = make_trio(), make_batch()
    rng = torch.Generator().manual_seed(0)
    assert not {"x_acceptance", "z_acceptance"} & dual_mcmc(trio, x, z, rng, PAPER).stats.keys()
    adjusted = replace(
        PAPER, x_chain=replace(PAPER.x_chain, metropolis=True), z_chain=replace(PAPER.z_chain, metropolis=True)
    )
    stats = dual_mcmc(trio, x, z, rng, adjusted).stats
    assert 0 < stats["x_acceptance"] <= 1
    assert 0 < stats["z_acceptance"] <= 1
    frozen_chains = replace(adjusted, x_chain=Chain(steps=5, step_size=1e6, metropolis=True))
    assert dual_mcmc(trio, x, z, rng, frozen_chains).stats["x_acceptance"] == 0
