"""Tiny networks, and what the methods have in common, stated a second time without the package's helpers."""

import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from dualmcmc.config import Chain, Teaching
from dualmcmc.methods.memory import Memory
from dualmcmc.nets import Trio

B, D, X = 6, 3, 5
PAPER = Teaching(
    latent_dim=D, sigma=0.4, x_chain=Chain(steps=5, step_size=0.03), z_chain=Chain(steps=4, step_size=0.02),
    buffer_size=20,
)  # fmt: skip


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(X, 8), nn.Tanh(), nn.Linear(8, D))
        self.log_var = nn.Linear(X, D)

    def forward(self, x):
        return self.mean(x), self.log_var(x)


def make_trio(*names):
    """All three networks, or those of these names."""
    energy = nn.Sequential(nn.Linear(X, 8), nn.SiLU(), nn.Linear(8, 1, bias=False), nn.Flatten(0))
    generator = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, X))
    nets = {"energy": energy, "generator": generator, "inference": TwoHeads()}
    return Trio(**{name: nets[name] for name in names or nets}).double()


def make_batch():
    return torch.randn(B, X, dtype=torch.float64), torch.randn(B, D, dtype=torch.float64)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(like, rng):
    return torch.randn(like.shape, dtype=torch.float64, generator=rng)


def x_chain(energy, x, rng, chain=PAPER.x_chain):
    """Langevin steps on exp(f) with f = -E."""
    for _ in range(chain.steps):
        point = x.detach().requires_grad_()
        score = torch.autograd.grad(-energy(point).sum(), point)[0]
        x = point.detach() + chain.step_size * score + (2 * chain.step_size) ** 0.5 * normal(x, rng)
    return x.detach()


def z_chain(generator, z, x, rng, sigma=PAPER.sigma, chain=PAPER.z_chain):
    """Langevin steps on p(z|x)."""
    for _ in range(chain.steps):
        point = z.detach().requires_grad_()
        log_joint = log_likelihood(generator, x, point, sigma) + log_prior(point)
        score = torch.autograd.grad(log_joint.sum(), point)[0]
        z = point.detach() + chain.step_size * score + (2 * chain.step_size) ** 0.5 * normal(z, rng)
    return z.detach()


def log_likelihood(generator, x, z, sigma=PAPER.sigma):
    """log p(x|z) = log N(x; g(z), sigma^2 I)."""
    return Independent(Normal(generator(z), sigma), 1).log_prob(x)


def log_prior(z):
    return Independent(Normal(torch.zeros_like(z), torch.ones_like(z)), 1).log_prob(z)


def posterior(inference, x):
    """q(z|x)."""
    mean, log_var = inference(x)
    return Independent(Normal(mean, log_var.exp().sqrt()), 1)


def elbo(generator, inference, x, rng, sigma=PAPER.sigma):
    """E_q log p(x|z) - KL(q(z|x) || p(z)) with one sample of q per x."""
    mean, log_var = inference(x)
    z = mean + log_var.exp().sqrt() * normal(mean, rng)
    q = posterior(inference, x)
    prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
    return log_likelihood(generator, x, z, sigma) - kl_divergence(q, prior)


def make_memory(method, cfg=PAPER, shape=(X,), images=B):
    """What the method remembers at first, for a batch of all images; None if it remembers nothing."""
    if method.memory is None:
        return None
    tensors = {name: value.double() for name, value in method.memory(cfg, shape, images, seeded(1)).items()}
    return Memory(tensors, torch.arange(images))


def gradients(value, net):
    return torch.autograd.grad(value, list(net.parameters()), allow_unused=True, retain_graph=True)


def assert_descends(loss, objective, *nets):
    """The loss's gradients are those of -objective, in these networks."""
    for net in nets:
        for found, ascent in zip(gradients(loss, net), gradients(objective, net), strict=True):
            assert found.abs().max() > 1e-3
            torch.testing.assert_close(found, -ascent, rtol=1e-6, atol=1e-10)


def dependencies(loss, trio):
    """The networks with a parameter that the loss depends on."""
    return {name for name, net in trio.named_children() if any(g is not None for g in gradients(loss, net))}


def assert_mean(draws, exact):
    """Independent draws (N, ...) have this mean, within five standard errors, which are small beside it."""
    error = draws.std(0) / len(draws) ** 0.5
    assert error.norm() < 0.05 * exact.norm()
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


class LinearGenerator(nn.Module):
    """g(z) = A z + b, so that p(x) = N(b, A A^T + sigma^2 I)."""

    def __init__(self, x_dim=X, z_dim=D):
        super().__init__()
        self.a = nn.Parameter(torch.randn(x_dim, z_dim, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(x_dim, dtype=torch.float64))

    def forward(self, z):
        return z @ self.a.T + self.b

    def joint(self, sigma):
        """p(z) p(x|z), of (x, z)."""
        identity = torch.eye(self.a.shape[1], dtype=torch.float64)
        rows = [torch.cat([self.covariance(sigma), self.a], 1), torch.cat([self.a.T, identity], 1)]
        return MultivariateNormal(torch.cat([self.b, torch.zeros_like(identity[0])]), torch.cat(rows))

    def covariance(self, sigma):
        return self.a @ self.a.T + sigma**2 * torch.eye(len(self.a), dtype=torch.float64)


class LinearInference(nn.Module):
    """q(z|x) = N(M x + m, diag v)."""

    def __init__(self, x_dim=X, z_dim=D):
        super().__init__()
        self.m = nn.Parameter(0.3 * torch.randn(z_dim, x_dim, dtype=torch.float64))
        self.c = nn.Parameter(0.3 * torch.randn(z_dim, dtype=torch.float64))
        self.log_var = nn.Parameter(0.3 * torch.randn(z_dim, dtype=torch.float64))

    def forward(self, x):
        mean = x @ self.m.T + self.c
        return mean, self.log_var.expand_as(mean)

    def joint(self, mean, covariance):
        """N(x; mean, covariance) q(z|x), of (x, z)."""
        cross = covariance @ self.m.T
        latent = self.m @ cross + self.log_var.exp().diag()
        rows = [torch.cat([covariance, cross], 1), torch.cat([cross.T, latent], 1)]
        return MultivariateNormal(torch.cat([mean, self.m @ mean + self.c]), torch.cat(rows))


class QuadraticEnergy(nn.Module):
    """E(x) = (x - c)^T L L^T (x - c) / 2, so that pi = N(c, (L L^T)^-1)."""

    def __init__(self, x_dim=X):
        super().__init__()
        self.c = nn.Parameter(torch.randn(x_dim, dtype=torch.float64))
        self.factor = nn.Parameter(torch.eye(x_dim) + 0.2 * torch.randn(x_dim, x_dim, dtype=torch.float64))

    def forward(self, x):
        return ((x - self.c) @ self.factor).square().sum(1) / 2

    def covariance(self):
        return torch.linalg.inv(self.factor @ self.factor.T)
