"""The kernels against closed forms: the law of a Langevin chain on a Gaussian is known at any step size."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dualmcmc.config import Chain
from dualmcmc.langevin import Trace, langevin, revise_x, revise_z
from dualmcmc.utils.errors import UserError

CHAINS = 50_000  # estimates a variance to about 0.6 %
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
PRECISION = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
EYE = torch.eye(2, dtype=torch.float64)


def gaussian(x):
    centered = x - MEAN
    return 0.5 * (centered @ PRECISION * centered).sum(1)


def stationary_covariance(precision, step_size, temperature=1.0):
    """The solution of C = A C A' + 2sT I with A = I - sP: T (P - s P^2 / 2)^-1."""
    return temperature * torch.linalg.inv(precision - step_size * precision @ precision / 2)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_stationary_law_of_the_discretized_chain(temperature):
    chain = Chain(steps=30, step_size=0.3, temperature=temperature)
    rng = torch.Generator().manual_seed(0)
    x = langevin(torch.zeros(CHAINS, 2, dtype=torch.float64), gaussian, chain, rng)
    expected = stationary_covariance(PRECISION, 0.3, temperature)
    assert torch.allclose(x.mean(0), MEAN, atol=0.01)
    assert torch.allclose(torch.cov(x.T), expected, rtol=0.02, atol=0.01 * temperature)
    # the step size keeps it away from the target's own covariance
    target = temperature * torch.linalg.inv(PRECISION)
    assert (expected - target).abs().max() > 0.2 * temperature


def test_law_after_a_few_steps():
    steps, s = 3, 0.2
    contraction = EYE - s * PRECISION
    power = torch.linalg.matrix_power
    mean = MEAN + power(contraction, steps) @ (torch.zeros(2, dtype=torch.float64) - MEAN)
    covariance = sum(2 * s * power(contraction, 2 * k) for k in range(steps))
    rng = torch.Generator().manual_seed(1)
    x = langevin(torch.zeros(CHAINS, 2, dtype=torch.float64), gaussian, Chain(steps=steps, step_size=s), rng)
    assert torch.allclose(x.mean(0), mean, atol=0.01)
    assert torch.allclose(torch.cov(x.T), covariance, rtol=0.02, atol=0.01)


def test_z_chain_samples_the_posterior_of_a_linear_generator():
    weight = torch.tensor([[1.0, 0.5], [-0.3, 0.8], [0.2, -1.0]], dtype=torch.float64)
    generator = nn.Linear(2, 3, dtype=torch.float64)
    with torch.no_grad():
        generator.weight.copy_(weight)
        generator.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    sigma, s = 0.7, 0.1
    x = torch.tensor([0.8, -1.1, 0.4], dtype=torch.float64)
    precision = EYE + weight.T @ weight / sigma**2
    mean = torch.linalg.solve(precision, weight.T @ (x - generator.bias.detach()) / sigma**2)
    rng = torch.Generator().manual_seed(2)
    start = torch.zeros(CHAINS, 2, dtype=torch.float64)
    z = revise_z(generator, start, x.expand(CHAINS, 3), sigma, Chain(steps=30, step_size=s), rng)
    assert torch.allclose(z.mean(0), mean, atol=0.01)
    assert torch.allclose(torch.cov(z.T), stationary_covariance(precision, s), rtol=0.03, atol=0.003)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.25}, {"grad_clip": 1.0}], ids=str)
def test_accept_reject_step_removes_the_bias(options):
    """At a step size where the unadjusted chain is off by 20 % and more."""
    chain, trace = Chain(steps=60, step_size=0.3, metropolis=True, **options), Trace(gradients_only=True)
    rng = torch.Generator().manual_seed(0)
    x = revise_x(gaussian, torch.zeros(CHAINS, 2, dtype=torch.float64), chain, rng, trace)
    assert torch.allclose(x.mean(0), MEAN, atol=0.015)
    target = chain.temperature * torch.linalg.inv(PRECISION)
    assert torch.allclose(torch.cov(x.T), target, rtol=0.03, atol=0.015 * chain.temperature)
    assert 0.5 < trace.acceptance_rate < 0.95
    biased = stationary_covariance(PRECISION, 0.3, chain.temperature)
    assert (biased - target).abs().max() > 0.2 * chain.temperature


def test_accept_reject_step_follows_the_definition():
    """One step, restated with the densities of torch.distributions."""
    normal = torch.distributions.Normal
    x, s = 2 * torch.randn(1000, 2, dtype=torch.float64), 0.5
    trace = Trace()
    end = revise_x(gaussian, x, Chain(steps=1, step_size=s, metropolis=True), torch.Generator().manual_seed(3), trace)
    rng = torch.Generator().manual_seed(3)
    mean = x - s * (x - MEAN) @ PRECISION
    proposal = mean + (2 * s) ** 0.5 * torch.randn(1000, 2, dtype=torch.float64, generator=rng)
    back = proposal - s * (proposal - MEAN) @ PRECISION
    log_ratio = gaussian(x) - gaussian(proposal)
    log_ratio += (normal(back, (2 * s) ** 0.5).log_prob(x) - normal(mean, (2 * s) ** 0.5).log_prob(proposal)).sum(1)
    accepted = torch.rand(1000, dtype=torch.float64, generator=rng).log() < log_ratio
    assert torch.equal(trace.accepted[0], accepted)
    assert 100 < accepted.sum() < 900
    assert torch.allclose(end, torch.where(accepted[:, None], proposal, x))
    assert torch.allclose(trace.potential[1], gaussian(end))
    assert torch.equal(trace.states[1], end)


def test_accept_reject_step_within_a_box():
    """The clamp restricts the target: a standard normal on [-1, 1] has the variance 0.2911."""
    chain = Chain(steps=60, step_size=0.2, metropolis=True, clamp=1.0)
    start = torch.zeros(CHAINS, 1, dtype=torch.float64)
    x = revise_x(lambda u: 0.5 * u.square().sum(1), start, chain, torch.Generator().manual_seed(0))
    assert x.abs().max() <= 1
    assert float(x.var()) == pytest.approx(0.2911, rel=0.02)


def test_accept_reject_step_given_observed_pixels():
    chain = Chain(steps=60, step_size=0.5, metropolis=True)
    start = torch.tensor([2.0, 0.0], dtype=torch.float64).repeat(CHAINS, 1)
    rng, observed = torch.Generator().manual_seed(0), torch.tensor([True, False])
    x = revise_x(gaussian, start, chain, rng, observed=observed)
    assert torch.equal(x[:, 0], start[:, 0])
    assert float(x[:, 1].mean()) == pytest.approx(-2.0 - 0.6 * (2.0 - 1.0), abs=0.02)  # of x2 given x1
    assert float(x[:, 1].var()) == pytest.approx(1.0, rel=0.03)


def test_accept_reject_step_evaluates_once_per_step_and_rejects_nan():
    calls = []

    def half_space(x):
        calls.append(x)
        return torch.where(x[:, 0] > 0, x.square().sum(1), torch.nan)

    x = torch.ones(50, 2, dtype=torch.float64)
    end = revise_x(half_space, x, Chain(steps=20, step_size=0.3, metropolis=True), torch.Generator().manual_seed(0))
    assert len(calls) == 21
    assert (end[:, 0] > 0).all()


def test_accept_reject_step_needs_noise():
    x = torch.randn(5, 2, dtype=torch.float64)
    chain = Chain(steps=3, step_size=0.1, temperature=0)
    assert torch.equal(revise_x(gaussian, x, replace(chain, metropolis=True)), langevin(x, gaussian, chain))


def test_trace_measures_convergence():
    """z of a linear generator: a Langevin chain on a Gaussian is autoregressive, with factor 1 - s p."""
    trace, s = Trace(every=10**6), 0.2
    start = torch.randn(16, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chain = Chain(steps=6000, step_size=s)
    revise_x(lambda u: 0.5 * u.square().sum(1), start, chain, torch.Generator().manual_seed(0), trace)
    factor = (1 - s) ** 2  # of the squares of the state, hence of the potential
    draws = 16 * (6001 - 100)
    assert trace.effective_sample_size(discard=100) == pytest.approx(draws * (1 - factor) / (1 + factor), rel=0.06)
    assert trace.r_hat(discard=100) < 1.01
    assert trace.r_hat("displacement", discard=100) > 1.01  # each from its own start
    with pytest.raises(UserError, match="at least 8 must remain"):
        trace.r_hat(discard=5995)
    assert trace.acceptance_rate is None
    with pytest.raises(UserError, match="unknown quantity 'energy': use potential, grad_norm"):
        trace.r_hat("energy")
    with pytest.raises(UserError, match="discard must be at least 0, not -1"):
        trace.effective_sample_size(discard=-1)


def test_temperature_zero_is_gradient_descent():
    x = torch.randn(5, 2, dtype=torch.float64)
    moved = langevin(x, gaussian, Chain(steps=1, step_size=0.1, temperature=0), None)
    assert torch.allclose(moved, x - 0.1 * (x - MEAN) @ PRECISION)


def test_noise_of_the_paper_and_the_authors():
    assert Chain(step_size=0.005).noise_std == pytest.approx(0.1)
    assert Chain(step_size=0.125, temperature=4e-6).noise_std == pytest.approx(0.001)
    assert Chain(steps=30).format_steps() == "30 steps"
    assert Chain(steps=1, temperature=0).format_steps() == "1 noise-free step"


def test_clamp_and_gradient_clip():
    x = torch.full((4, 2), 100.0, dtype=torch.float64)
    start = x.clone()
    clipped = langevin(x, gaussian, Chain(steps=1, step_size=1, temperature=0, grad_clip=2.0), None)
    assert torch.allclose((clipped - x).norm(dim=1), torch.full((4,), 2.0, dtype=torch.float64))
    small = MEAN + 1e-3 * torch.randn(4, 2, dtype=torch.float64)
    free = Chain(steps=1, step_size=1, temperature=0)
    gentle = Chain(steps=1, step_size=1, temperature=0, grad_clip=2.0)
    assert torch.equal(langevin(small, gaussian, free, None), langevin(small, gaussian, gentle, None))
    clamped = langevin(x, gaussian, Chain(steps=2, step_size=0.1, clamp=0.5), None)
    assert clamped.abs().max() <= 0.5
    assert torch.equal(x, start)  # the input is not modified


def test_seed_fixes_the_chain_and_nothing_is_differentiated():
    energy = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    x = torch.randn(3, 1, 2, 2)
    chain = Chain(steps=4, step_size=0.1)
    first, second = (revise_x(energy, x, chain, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, revise_x(energy, x, chain, torch.Generator().manual_seed(8)))
    assert not first.requires_grad
    assert all(parameter.grad is None for parameter in energy.parameters())
    assert torch.equal(revise_x(energy, x, Chain(steps=0), None), x)


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"metropolis": True}], ids=str)
def test_chains_inside_vmap(options):
    """Four batches of chains at once, each as if it ran alone."""
    x, chain = torch.randn(4, 5, 2, dtype=torch.float64), Chain(steps=3, step_size=0.3, **options)

    def run(start):
        return revise_x(gaussian, start, chain, torch.Generator().manual_seed(0))

    together = torch.func.vmap(run, randomness="same")(x)
    assert torch.allclose(together, torch.stack([run(start) for start in x]))
    different = torch.func.vmap(lambda start: revise_x(gaussian, start, chain), randomness="different")(
        x[:1].repeat(2, 1, 1)
    )
    assert torch.equal(different[0], different[1]) == (options == {"temperature": 0})


def test_chain_inside_no_grad():
    with torch.no_grad():
        x = langevin(torch.ones(2, 2, dtype=torch.float64), gaussian, Chain(steps=1, step_size=0.1), None)
    assert x.shape == (2, 2)


def test_trace():
    generator = nn.Linear(2, 3)
    x, z = torch.randn(5, 3), torch.randn(5, 2)
    plain = revise_z(generator, z, x, 0.5, Chain(steps=7, step_size=0.01), torch.Generator().manual_seed(0))
    trace = Trace(every=3)
    traced = revise_z(generator, z, x, 0.5, Chain(steps=7, step_size=0.01), torch.Generator().manual_seed(0), trace)
    assert torch.equal(plain, traced)  # tracing changes nothing
    assert trace.kept_at == [0, 3, 6, 7]
    assert torch.equal(trace.states[0], z)
    assert torch.equal(trace.states[-1], traced)
    assert len(trace.potential) == len(trace.mse) == len(trace.displacement) == 8
    assert len(trace.grad_norm) == 7
    with torch.no_grad():
        for state, step in zip(trace.states, trace.kept_at, strict=True):
            error = (x - generator(state)).square()
            assert torch.allclose(trace.mse[step], error.mean(1), atol=1e-5)
            joint = error.sum(1) / (2 * 0.25) + 0.5 * state.square().sum(1)
            assert torch.allclose(trace.potential[step], joint, rtol=1e-5)
            assert torch.allclose(trace.displacement[step], (state - z).square().mean(1).sqrt(), atol=1e-6)


def test_trace_of_gradients_alone_costs_no_evaluation():
    calls = []

    def potential(x):
        calls.append(x)
        return gaussian(x)

    trace = Trace(gradients_only=True)
    x, chain = torch.randn(5, 2, dtype=torch.float64), Chain(steps=3, step_size=0.1)
    traced = langevin(x, potential, chain, torch.Generator().manual_seed(0), trace)
    assert torch.equal(traced, langevin(x, gaussian, chain, torch.Generator().manual_seed(0)))
    assert len(calls) == len(trace.grad_norm) == 3
    full = Trace()
    langevin(x, gaussian, chain, torch.Generator().manual_seed(0), full)
    assert all(torch.equal(a, b) for a, b in zip(trace.grad_norm, full.grad_norm, strict=True))
    assert trace.states == trace.potential == []


def test_energy_returns_one_value_per_sample():
    for net in (nn.Linear(2, 1), lambda x: x.sum(1)):
        assert revise_x(net, torch.randn(3, 2), Chain(steps=1), None).shape == (3, 2)
    with pytest.raises(ValueError, match="one each"):
        revise_x(nn.Linear(2, 2), torch.randn(3, 2), Chain(steps=1), None)


def test_observed_pixels_stay_and_the_rest_is_conditioned_on_them():
    """A correlated Gaussian with x1 observed: gradient descent takes x2 to its conditional mean."""
    precision = torch.tensor([[2.0, 1.2], [1.2, 1.5]], dtype=torch.float64)
    x = torch.tensor([[0.7, 3.0], [-1.0, 0.0]], dtype=torch.float64)
    observed = torch.tensor([True, False])

    def energy(u):
        return 0.5 * (u @ precision * u).sum(1)

    end = revise_x(energy, x, Chain(steps=150, step_size=0.2, temperature=0), observed=observed)
    assert torch.equal(end[:, 0], x[:, 0])
    assert torch.allclose(end[:, 1], -1.2 / 1.5 * x[:, 0], atol=1e-9)
    noisy = revise_x(energy, x, Chain(steps=5, clamp=0.5), torch.Generator().manual_seed(0), observed=observed)
    assert torch.equal(noisy[:, 0], x[:, 0])  # unaffected by noise and clamp
    assert noisy[:, 1].abs().max() <= 0.5


def test_gradient_clip_ignores_observed_pixels():
    chain = Chain(steps=1, step_size=1.0, temperature=0, grad_clip=1.0)
    x = torch.tensor([[100.0, 2.0]])
    end = revise_x(lambda u: 0.5 * u.square().sum(1), x, chain, observed=torch.tensor([True, False]))
    assert torch.allclose(end, torch.tensor([[100.0, 1.0]]))


def test_projection_is_applied_after_every_step():
    seen = []

    def unit_circle(state):
        seen.append(state)
        return state / state.norm(dim=1, keepdim=True)

    x = torch.randn(4, 2, dtype=torch.float64)
    end = langevin(x, gaussian, Chain(steps=3, step_size=0.1, clamp=0.5), None, project=unit_circle)
    assert torch.allclose(end.norm(dim=1), torch.ones(4, dtype=torch.float64))
    assert len(seen) == 3
    assert all(state.abs().max() <= 0.5 for state in seen)  # it comes last


def test_z_chain_on_observed_pixels_samples_their_posterior():
    """With a linear generator the mean of p(z | observed) is a ridge regression on the observed rows."""
    weights = torch.randn(6, 2, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    observed = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    sigma, trace = 0.5, Trace()
    chain = Chain(steps=400, step_size=0.05, temperature=0)
    start = torch.zeros(3, 2, dtype=torch.float64)
    z = revise_z(lambda z: z @ weights.T, start, x, sigma, chain, trace=trace, observed=observed)
    for index in range(3):
        rows, known = weights[observed[index]], x[index, observed[index]]
        expected = torch.linalg.solve(rows.T @ rows + sigma**2 * torch.eye(2), rows.T @ known)
        assert torch.allclose(z[index], expected, atol=1e-8)
        assert torch.allclose(trace.mse[-1][index], (known - rows @ z[index]).square().mean())
