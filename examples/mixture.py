"""Dual-MCMC teaching on a mixture of Gaussians in the plane, with your own networks and data.

In two dimensions the EBM's density can be integrated on a grid, so KL(data || EBM) is computed, not estimated from
samples. Chains (temperature 1) and loss weights are the paper's. Run it, in a loop of its own or with the engine:

    python examples/mixture.py --out docs/images/mixture.png
    python examples/mixture.py --run runs/mixture
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import dualmcmc
from dualmcmc import Chain, Optimizers, Teaching, Trio, step

MODES, RADIUS, SPREAD = 6, 2.0, 0.3
EDGE, CELLS = 5.0, 400  # densities are integrated over [-EDGE, EDGE]^2
POINTS = 50_000  # for the engine
LEARNING_RATES = {"energy": 3e-4, "generator": 1e-3, "inference": 1e-3}
TEACHING = Teaching(
    latent_dim=2,
    sigma=0.15,
    start_noise=0.15,  # x_hat is a sample of p(x|z), not its mean
    x_chain=Chain(steps=30, step_size=0.02),
    z_chain=Chain(steps=10, step_size=0.002),
)


def centers() -> Tensor:
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], 1)


def sample_data(count: int, rng: torch.Generator) -> Tensor:
    modes = centers()[torch.randint(MODES, (count,), generator=rng)]
    return modes + SPREAD * torch.randn(count, 2, generator=rng)


class Energy(nn.Module):
    """A small network plus the energy of a wide Gaussian, which makes exp(-E) integrable."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers = [nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).flatten() + x.square().sum(1) / 8


class Inference(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean, self.log_var = nn.Linear(width, 2), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layers(x)
        return self.mean(h), self.log_var(h)


def grid() -> tuple[Tensor, float]:
    """The centers of the cells, (CELLS^2, 2), and the area of one."""
    ticks = (torch.arange(CELLS) + 0.5) * (2 * EDGE / CELLS) - EDGE
    return torch.cartesian_prod(ticks, ticks), (2 * EDGE / CELLS) ** 2


def log_data_density(x: Tensor) -> Tensor:
    squares = (x[:, None] - centers()).square().sum(2)
    return torch.logsumexp(-squares / (2 * SPREAD**2), 1) - math.log(MODES * 2 * math.pi * SPREAD**2)


@torch.no_grad()
def log_model_density(energy: nn.Module) -> Tensor:
    """log pi(x) on the grid, normalised over it."""
    points, area = grid()
    f = -torch.cat([energy(part) for part in points.split(20_000)])
    return f - torch.logsumexp(f, 0) - math.log(area)


def kl_to_data(energy: nn.Module) -> float:
    """KL(data || EBM), integrated on the grid."""
    points, area = grid()
    log_p = log_data_density(points)
    return float((log_p.exp() * (log_p - log_model_density(energy))).sum() * area)


def mode_weights(energy: nn.Module) -> Tensor:
    """The EBM's probability of each mode, (MODES,); 1 / MODES for the data."""
    points, area = grid()
    nearest = (points[:, None] - centers()).square().sum(2).argmin(1)
    return torch.zeros(MODES).index_add(0, nearest, log_model_density(energy).exp() * area)


@dataclass
class Result:
    trio: Trio
    initial: Tensor  # log density of the untrained EBM on the grid
    iterations: list[int] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


def build(seed: int) -> Trio:
    torch.manual_seed(seed)
    generator = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )
    return Trio(Energy(), generator, Inference())


def train(iterations: int, seed: int = 0, batch: int = 256, every: int = 250) -> Result:
    """In a loop of its own, on new points in every iteration."""
    rng, trio = torch.Generator().manual_seed(seed), build(seed)
    optimizers = Optimizers(
        **{name: torch.optim.Adam(net.parameters(), lr=LEARNING_RATES[name]) for name, net in trio.named_children()}
    )
    result = Result(trio, log_model_density(trio.energy))
    for iteration in range(iterations):
        if iteration % every == 0:
            result.iterations.append(iteration)
            result.kl.append(kl_to_data(trio.energy))
        decay = min(1.0, 2 * (1 - iteration / iterations))
        for name, optimizer in optimizers._asdict().items():
            optimizer.param_groups[0]["lr"] = LEARNING_RATES[name] * decay
        step(trio, optimizers, sample_data(batch, rng), rng, TEACHING)
    result.iterations.append(iterations)
    result.kl.append(kl_to_data(trio.energy))
    return result


def train_run(folder: Path, iterations: int, seed: int = 0) -> Result:
    """With the engine and the preset `vectors`, on 50,000 points."""
    config = dualmcmc.load_config("vectors", [f"seed={seed}"])
    config = replace(config, train=replace(config.train, images=iterations * config.train.batch))
    trio, points = build(seed), sample_data(POINTS, torch.Generator().manual_seed(seed))
    result = Result(trio, log_model_density(trio.energy), [0, iterations], [kl_to_data(trio.energy)])
    dualmcmc.train(config, folder, "cpu", networks=trio, data=points)
    result.kl.append(kl_to_data(trio.energy))
    return result


def save_figure(result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    points, _ = grid()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        mean = result.trio.generator(torch.randn(2000, 2, generator=rng))
    samples = mean + TEACHING.sigma * torch.randn(mean.shape, generator=rng)
    fig = Figure(figsize=(15, 3.2), layout="constrained")
    axes = fig.subplots(1, 5)
    densities = {
        "data": log_data_density(points),
        f"EBM before: KL {result.kl[0]:.2f}": result.initial,
        f"EBM after: KL {result.kl[-1]:.3f}": log_model_density(result.trio.energy),
    }
    for axis, (title, density) in zip(axes, densities.items(), strict=False):
        image = density.exp().reshape(CELLS, CELLS).T.numpy()
        axis.imshow(image, origin="lower", extent=[-EDGE, EDGE, -EDGE, EDGE], cmap="Blues")
        axis.set(title=title)
    axes[3].scatter(*samples.T.numpy(), s=1, color="#d97706")
    axes[3].set(title="generator", aspect="equal")
    for axis in axes[:4]:
        axis.set(xlim=(-3.5, 3.5), ylim=(-3.5, 3.5), xticks=[], yticks=[])
    axes[4].plot(result.iterations, result.kl, color="#2563eb")
    axes[4].set(title="KL(data || EBM)", xlabel="iteration", yscale="log")
    axes[4].grid(alpha=0.25)
    fig.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Dual-MCMC teaching on a mixture in the plane")
    parser.add_argument("--iterations", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mixture.png"))
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="train with the engine, in this run folder")
    arguments = parser.parse_args()
    if arguments.run is None:
        result = train(arguments.iterations, arguments.seed)
    else:
        result = train_run(arguments.run, arguments.iterations, arguments.seed)
    save_figure(result, arguments.out)
    weights = ", ".join(f"{weight:.3f}" for weight in mode_weights(result.trio.energy))
    print(f"KL(data || EBM): {result.kl[0]:.3f} before, {result.kl[-1]:.4f} after")
    print(f"probability of each mode (data: {1 / MODES:.3f}): {weights}")
    print(f"figure: {arguments.out}")


if __name__ == "__main__":
    main()
