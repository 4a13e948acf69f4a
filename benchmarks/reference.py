"""Algorithm 1 as one would first write it: plain eager PyTorch, nothing folded, nothing saved, nothing fused.

What `dualmcmc bench` measures against, and what it and the tests check the package against. It shares no code with the
package: networks, chains and updates are stated again, from the paper and the authors' settings. Parameters have the
same names, so that one's weights fit the other.

The chains hold the spectral norm still, as the package does, so that both compute the same; the authors' code lets
it iterate there. `second_x_chain` is their form, with fresh negatives for the energy after the generator's update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

Lap = Callable[[str], None]
Network = Callable[[Tensor], Tensor]


class DownBlock(nn.Module):
    def __init__(self, inside: int, outside: int, down: bool, first: bool = False) -> None:
        super().__init__()
        self.down, self.first = down, first
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False) if down or inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        short = x if self.shortcut is None else self.shortcut(x)
        return F.avg_pool2d(h, 2) + F.avg_pool2d(short, 2) if self.down else h + short


class UpBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inside), nn.BatchNorm2d(outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(_doubled(F.relu(self.norm1(x))))
        return self.conv2(F.relu(self.norm2(h))) + self.shortcut(_doubled(x))


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class ResnetEnergy(nn.Module):
    def __init__(self, size: int, channels: int, nef: int) -> None:
        super().__init__()
        blocks: list[nn.Module]
        if size <= 32:
            blocks = [DownBlock(channels, nef, True, first=True), DownBlock(nef, nef, True)]
            blocks += [DownBlock(nef, nef, False) for _ in range(2)]
        else:
            widths = _widths(size, nef)[::-1]
            blocks = [DownBlock(channels, widths[0], True, first=True)]
            blocks += [DownBlock(a, b, True) for a, b in pairwise(widths)]
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(nef, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.blocks(x)).mean(dim=(2, 3))).flatten()


class ResnetGenerator(nn.Module):
    def __init__(self, size: int, channels: int, nef: int, latent_dim: int) -> None:
        super().__init__()
        widths, self.base = _widths(size, nef), _base(size)
        self.start = nn.Linear(latent_dim, widths[0] * self.base**2)
        self.blocks = nn.Sequential(*(UpBlock(a, b) for a, b in pairwise(widths)))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.out = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.start(z).unflatten(1, (-1, self.base, self.base))
        return torch.tanh(self.out(F.relu(self.norm(self.blocks(h)))))


class SimpleEnergy(nn.Module):
    def __init__(self, size: int, channels: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [min(width << level, 4 * width) for level in range(_halvings(size) + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
            layers += [part for _ in range(depth - 1) for part in (nn.Conv2d(b, b, 3, padding=1), nn.LeakyReLU(0.2))]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden, self.out = nn.Linear(widths[-1] * _base(size) ** 2, width), nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.leaky_relu(self.hidden(self.features(x)), 0.2)).flatten()


class SimpleGenerator(nn.Module):
    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        widths = [min(8 * width, 2 * width << level) for level in range(_halvings(size), -1, -1)]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent_dim, widths[0], _base(size)), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths):
            layers += [nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.layers(z[:, :, None, None]))


class Inference(nn.Module):
    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        widths = [min(width << level, max(1024, width)) for level in range(_halvings(size) + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.mean = nn.Conv2d(widths[-1], latent_dim, _base(size))
        self.log_var = nn.Conv2d(widths[-1], latent_dim, _base(size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.mean(h).flatten(1), self.log_var(h).flatten(1)


def _base(size: int) -> int:
    return size >> _halvings(size)


def _halvings(size: int) -> int:
    count = 0
    while size > 7 and size % 2 == 0:
        size, count = size // 2, count + 1
    return count


def _widths(size: int, nef: int) -> list[int]:
    """Of a resnet's maps, smallest map first."""
    count = _halvings(size) + 1
    return [nef] * count if size <= 32 else [max(nef >> level, min(nef, 64)) for level in range(count)]


class Reference:
    """The three networks, their optimizers, and one iteration after the other. `config`: the package's settings."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.cfg, nets, data = config.teaching, config.nets, config.data
        self.energy: nn.Module
        self.generator: nn.Module
        if nets.kind == "simple":
            self.energy = SimpleEnergy(data.size, data.channels, nets.energy_width, nets.energy_depth)
            self.generator = SimpleGenerator(data.size, data.channels, nets.generator_width, self.cfg.latent_dim)
        else:
            self.energy = ResnetEnergy(data.size, data.channels, nets.energy_width)
            self.generator = ResnetGenerator(data.size, data.channels, nets.generator_width, self.cfg.latent_dim)
        self.inference: nn.Module = Inference(data.size, data.channels, nets.inference_width, self.cfg.latent_dim)
        if nets.spectral_norm:
            for module in list(self.energy.modules()):
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    spectral_norm(module)
        self.nets = nn.ModuleDict({name: getattr(self, name) for name in ("energy", "generator", "inference")})
        self.nets.to(device).train()
        self.optimizers = {
            name: torch.optim.Adam(
                net.parameters(), lr=opt.lr, betas=opt.betas, eps=opt.eps, weight_decay=opt.weight_decay
            )
            for name, net in self.nets.items()
            for opt in [getattr(config.optim, name)]
        }

    def iteration(self, x: Tensor, rng: torch.Generator, lap: Lap = lambda part: None) -> dict[str, Tensor]:
        """Algorithm 1 on data x (B, C, H, W); `lap` is told the name of each part as it ends."""
        cfg = self.cfg
        z = torch.randn(len(x), cfg.latent_dim, device=x.device, generator=rng)
        x_hat = self.generator(z)
        lap("generator")
        x_start, x_rev = self.x_chain(x_hat, rng)
        lap("x-chain")
        mean, log_var = self.inference(x)
        z_hat = (mean + torch.exp(0.5 * log_var) * _noise(mean, rng)).detach()
        lap("inference")
        z_rev = self.z_chain(z_hat, x, rng)
        lap("z-chain")

        chosen = cfg.generator_data_weight, cfg.generator_sample_weight
        weights = [1 / (2 * cfg.sigma**2) if weight is None else weight for weight in chosen]
        data_error = (x - self.generator(z_rev)).square().flatten(1).sum(1).mean()
        sample_error = (x_rev - x_hat).square().flatten(1).sum(1).mean()
        g_norm = self._update("generator", weights[0] * data_error + weights[1] * sample_error)
        lap("generator")

        data_nll = _nll(mean, log_var, z_rev)
        mean_rev, log_var_rev = self.inference(x_rev)
        sample_nll = _nll(mean_rev, log_var_rev, z)
        loss = cfg.inference_data_weight * data_nll + cfg.inference_sample_weight * sample_nll
        i_norm = self._update("inference", loss)
        lap("inference")

        if cfg.second_x_chain:
            with torch.no_grad():
                again = self.generator(z)
            lap("generator")
            _, x_rev_e = self.x_chain(again, rng)
            lap("x-chain")
        else:
            x_rev_e = x_rev
        seen = [x, x_rev_e, *(self._moved(x, x_rev_e, rng) if cfg.energy_consistency else ())]
        on_data, on_samples, *moved = self.energy(torch.cat(seen)).split(len(x))
        gap = on_samples.mean() - on_data.mean()
        squares = on_data.square().mean() + on_samples.square().mean()
        loss = cfg.energy_l2 * squares - gap
        for in_place, elsewhere in zip((on_data, on_samples), moved, strict=False):
            loss = loss + cfg.energy_consistency * ((in_place - elsewhere) ** 2).mean()
        e_norm = self._update("energy", cfg.energy_weight * loss)
        lap("energy")
        return {
            "energy_data": on_data.mean().detach(),
            "energy_sample": on_samples.mean().detach(),
            "energy_gap": gap.detach(),
            "reconstruction_mse": data_error.detach() / x[0].numel(),
            "x_moved": (x_rev - x_start).square().flatten(1).mean(1).sqrt().mean(),
            "z_moved": (z_rev - z_hat).square().flatten(1).mean(1).sqrt().mean(),
            "inference_data_nll": data_nll.detach(),
            "inference_sample_nll": sample_nll.detach(),
            "grad_norm_generator": g_norm,
            "grad_norm_inference": i_norm,
            "grad_norm_energy": e_norm,
        }

    def x_chain(self, x_hat: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Where it starts, and x after k_x Langevin steps on the energy."""
        start = x_hat.detach()
        if self.cfg.start_noise > 0:
            start = start + self.cfg.start_noise * _noise(start, rng)
        with _still(self.energy):
            return start, self._langevin(start, self.energy, self.cfg.x_chain, rng)

    def z_chain(self, z: Tensor, x: Tensor, rng: torch.Generator) -> Tensor:
        """z after k_z Langevin steps on p(z|x)."""

        def negative_log_joint(z: Tensor) -> Tensor:
            error = (x - self.generator(z)).square().flatten(1).sum(1)
            return error / (2 * self.cfg.sigma**2) + 0.5 * z.square().sum(1)

        return self._langevin(z, negative_log_joint, self.cfg.z_chain, rng)

    def _moved(self, x: Tensor, x_rev: Tensor, rng: torch.Generator) -> list[Tensor]:
        """Each moved by up to `energy_shift` pixels, by products with matrices that select rows and columns."""
        most, (height, width) = self.cfg.energy_shift, x.shape[2:]
        first = torch.randint(2 * most + 1, (len(x), 2, 2), device=x.device, generator=rng)  # image, of pair, axis
        moved = []
        for of_pair, images in enumerate((x, x_rev)):
            rows, columns = (
                torch.eye(n + 2 * most, device=x.device)[
                    first[:, of_pair, axis, None] + torch.arange(n, device=x.device)
                ]
                for axis, n in enumerate((height, width))
            )
            padded = F.pad(images, (most, most, most, most), mode="reflect")
            moved.append(torch.einsum("bhi,bcij,bwj->bchw", rows, padded, columns))
        return moved

    def _langevin(
        self, state: Tensor, potential: Callable[[Tensor], Tensor], chain: Any, rng: torch.Generator
    ) -> Tensor:
        if chain.grad_clip is not None:
            raise ValueError("the reference has no grad_clip")
        std = (2 * chain.step_size * chain.temperature) ** 0.5
        for _ in range(chain.steps):
            state = state.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(potential(state).sum(), state)
            state = state.detach() - chain.step_size * gradient
            if std > 0:
                state = state + std * _noise(state, rng)
            if chain.clamp is not None:
                state = state.clamp(-chain.clamp, chain.clamp)
        return state.detach()

    def _update(self, name: str, loss: Tensor) -> Tensor:
        self.optimizers[name].zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.nets[name].parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.optimizers[name].step()
        return norm


@contextmanager
def _still(net: nn.Module) -> Iterator[None]:
    """Spectral norms that do not iterate."""
    net.eval()
    try:
        yield
    finally:
        net.train()


def _noise(like: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(like.shape, device=like.device, dtype=like.dtype, generator=rng)


def _nll(mean: Tensor, log_var: Tensor, z: Tensor) -> Tensor:
    return 0.5 * (log_var + (z - mean).square() * torch.exp(-log_var)).sum(1).mean()
