"""Algorithm 1 in plain eager PyTorch, as one would first write it: nothing fused, cached or compiled.

`dualmcmc bench` compares the engine with it, in values and in speed. It shares no code with the package: networks,
chains and updates are written again, from the paper and the authors' settings. Parameters have the package's names, so
that weights can be copied.

Like the package, and unlike the authors' code, it runs no power iterations of the spectral norm inside a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Scale(nn.Module):
    """An activation of the energy network, or the identity (`kind` = "none"), times a stored gain if there is one."""

    value: Tensor

    def __init__(self, kind: str, gain: bool) -> None:
        super().__init__()
        self.kind = kind
        if gain:
            self.register_buffer("value", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.kind == "none" else F.leaky_relu(x, 0.2 if self.kind == "leaky" else 0.0)
        return h * self.value if hasattr(self, "value") else h


class DownBlock(nn.Module):
    """Residual block of the energy network."""

    def __init__(self, in_channels: int, out_channels: int, down: bool, gain: bool, first: bool = False) -> None:
        super().__init__()
        self.down = down
        self.act1 = nn.Identity() if first else Scale("relu", gain)
        self.act2 = Scale("relu", gain)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        project = down or in_channels != out_channels
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=False) if project else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(self.act2(self.conv1(self.act1(x))))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return F.avg_pool2d(h, 2) + F.avg_pool2d(shortcut, 2) if self.down else h + shortcut


class UpBlock(nn.Module):
    """Residual block of the generator; doubles the resolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(in_channels), nn.BatchNorm2d(out_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(upsample(F.relu(self.norm1(x))))
        return self.conv2(F.relu(self.norm2(h))) + self.shortcut(upsample(x))


def upsample(x: Tensor) -> Tensor:
    """Twice the resolution, bilinear."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class ResnetEnergy(nn.Module):
    """E(x) with residual blocks."""

    def __init__(self, size: int, channels: int, nef: int, gain: bool) -> None:
        super().__init__()
        blocks: list[nn.Module]
        if size <= 32:
            blocks = [DownBlock(channels, nef, True, gain, first=True), DownBlock(nef, nef, True, gain)]
            blocks += [DownBlock(nef, nef, False, gain) for _ in range(2)]
        else:
            widths = resnet_widths(size, nef)[::-1]
            blocks = [DownBlock(channels, widths[0], True, gain, first=True)]
            blocks += [DownBlock(a, b, True, gain) for a, b in pairwise(widths)]
        self.blocks, self.activation = nn.Sequential(*blocks), Scale("relu", gain)
        self.out, self.out_gain = nn.Linear(nef, 1, bias=False), Scale("none", gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_gain(self.out(self.activation(self.blocks(x)).mean(dim=(2, 3)))).flatten()


class ResnetGenerator(nn.Module):
    """g(z) with residual blocks."""

    def __init__(self, size: int, channels: int, nef: int, latent_dim: int) -> None:
        super().__init__()
        widths, self.base = resnet_widths(size, nef), smallest_map(size)
        self.start = nn.Linear(latent_dim, widths[0] * self.base**2)
        self.blocks = nn.Sequential(*(UpBlock(a, b) for a, b in pairwise(widths)))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.out = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.start(z).unflatten(1, (-1, self.base, self.base))
        return torch.tanh(self.out(F.relu(self.norm(self.blocks(h)))))


class SimpleEnergy(nn.Module):
    """E(x) with plain convolutions."""

    def __init__(self, size: int, channels: int, width: int, depth: int, gain: bool) -> None:
        super().__init__()
        widths = [min(width << level, 4 * width) for level in range(halvings(size) + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), Scale("leaky", gain)]
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 4, stride=2, padding=1), Scale("leaky", gain)]
            for _ in range(depth - 1):
                layers += [nn.Conv2d(b, b, 3, padding=1), Scale("leaky", gain)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(widths[-1] * smallest_map(size) ** 2, width)
        self.hidden_activation = Scale("leaky", gain)
        self.out, self.out_gain = nn.Linear(width, 1, bias=False), Scale("none", gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_gain(self.out(self.hidden_activation(self.hidden(self.features(x))))).flatten()


class SimpleGenerator(nn.Module):
    """g(z) with plain transposed convolutions."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        widths = [min(8 * width, 2 * width << level) for level in range(halvings(size), -1, -1)]
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent_dim, widths[0], smallest_map(size)), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths):
            layers += [nn.ConvTranspose2d(a, b, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], channels, 3, padding=1))

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(self.layers(z[:, :, None, None]))


class StyledConv(nn.Module):
    """StyleGAN2's convolution: for each image, kernels scaled by its style and normalised; bias; leaky ReLU."""

    def __init__(self, in_channels: int, out_channels: int, style_dim: int, up: bool = False) -> None:
        super().__init__()
        self.up = up
        self.scale = nn.Linear(style_dim, in_channels)
        self.conv: nn.Conv2d | nn.ConvTranspose2d = (
            nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1, bias=False)
            if up
            else nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        )
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        kernel = self.conv.weight.transpose(0, 1) if self.up else self.conv.weight  # (out, in, height, width)
        kernels = kernel * (1 + self.scale(style))[:, None, :, None, None]  # one for each image
        variance = kernels.square().sum(dim=(2, 3, 4), keepdim=True)
        kernels = kernels / torch.sqrt((variance / 4 if self.up else variance) + 1e-8)
        images = x.flatten(0, 1)[None]  # the batch as groups of channels
        if self.up:
            kernels = kernels.transpose(1, 2).flatten(0, 1)
            h = F.conv_transpose2d(images, kernels, stride=2, padding=1, groups=len(x))
        else:
            h = F.conv2d(images, kernels.flatten(0, 1), padding=1, groups=len(x))
        return scaled_leaky_relu(h[0].unflatten(0, (len(x), -1)) + self.bias[:, None, None])


def scaled_leaky_relu(x: Tensor) -> Tensor:
    """Leaky ReLU that keeps the root mean square of N(0, 1)."""
    return F.leaky_relu(x, 0.2) / 0.52**0.5


class StyleGenerator(nn.Module):
    """g(z) as a small StyleGAN2."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        self.base = smallest_map(size)
        widths = [min(8 * width, 2 * width << level) for level in range(halvings(size), -1, -1)]
        self.style = nn.ModuleList(nn.Linear(latent_dim, latent_dim) for _ in range(2))
        self.start = nn.Linear(latent_dim, widths[0] * self.base**2)
        self.first = StyledConv(widths[0], widths[0], latent_dim)
        self.ups = nn.ModuleList(StyledConv(a, b, latent_dim, up=True) for a, b in pairwise(widths))
        self.convs = nn.ModuleList(StyledConv(b, b, latent_dim) for b in widths[1:])
        self.to_image = nn.ModuleList(nn.Conv2d(b, channels, 1) for b in widths[1:])

    def forward(self, z: Tensor) -> Tensor:
        style = scaled_leaky_relu(self.style[1](scaled_leaky_relu(self.style[0](z))))
        h = self.first(self.start(z).unflatten(1, (-1, self.base, self.base)), style)
        image = torch.zeros(())
        for level, (up, conv, to_image) in enumerate(zip(self.ups, self.convs, self.to_image, strict=True)):
            h = conv(up(h, style), style)
            image = to_image(h) if level == 0 else upsample(image) + to_image(h)
        return torch.tanh(0.4 * image)


class Inference(nn.Module):
    """q(z|x): the mean and log-variance of a Gaussian."""

    def __init__(self, size: int, channels: int, width: int, latent_dim: int) -> None:
        super().__init__()
        widths = [min(width << level, max(1024, width)) for level in range(halvings(size) + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.2)]
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers)
        self.mean = nn.Conv2d(widths[-1], latent_dim, smallest_map(size))
        self.log_var = nn.Conv2d(widths[-1], latent_dim, smallest_map(size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.mean(h).flatten(1), self.log_var(h).flatten(1)


def halvings(size: int) -> int:
    """How often an image is halved."""
    count = 0
    while size > 7 and size % 2 == 0:
        size, count = size // 2, count + 1
    return count


def smallest_map(size: int) -> int:
    """Side of the smallest feature map."""
    return size >> halvings(size)


def resnet_widths(size: int, nef: int) -> list[int]:
    """Channels of a resnet's feature maps, the smallest map first."""
    count = halvings(size) + 1
    return [nef] * count if size <= 32 else [max(nef >> level, min(nef, 64)) for level in range(count)]


class Reference:
    """The three networks and their optimizers. `config` is the package's."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.cfg, nets, data = config.teaching, config.nets, config.data
        image, latent_dim = (data.size, data.channels), self.cfg.latent_dim
        gain = nets.energy_slope is not None
        self.energy: nn.Module
        self.generator: nn.Module
        if nets.kind == "resnet":
            self.energy = ResnetEnergy(*image, nets.energy_width, gain)
            self.generator = ResnetGenerator(*image, nets.generator_width, latent_dim)
        else:
            self.energy = SimpleEnergy(*image, nets.energy_width, nets.energy_depth, gain)
            generator = StyleGenerator if nets.kind == "style" else SimpleGenerator
            self.generator = generator(*image, nets.generator_width, latent_dim)
        self.inference: nn.Module = Inference(*image, nets.inference_width, latent_dim)
        if nets.spectral_norm:
            for module in list(self.energy.modules()):
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    spectral_norm(module)
        self.nets = nn.ModuleDict({"energy": self.energy, "generator": self.generator, "inference": self.inference})
        self.nets.to(device).train()
        self.optimizers = {}
        for name, net in self.nets.items():
            opt = getattr(config.optim, name)
            self.optimizers[name] = torch.optim.Adam(
                net.parameters(), lr=opt.lr, betas=opt.betas, eps=opt.eps, weight_decay=opt.weight_decay
            )

    def iteration(
        self, x: Tensor, rng: torch.Generator, lap: Callable[[str], None] = lambda part: None
    ) -> dict[str, Tensor]:
        """One iteration on images x (B, C, H, W). Calls `lap` with the name of each part when it ends."""
        cfg = self.cfg

        # MCMC sampling
        z = torch.randn(len(x), cfg.latent_dim, device=x.device, generator=rng)
        x_hat = self.generator(z)
        lap("generator")
        x_start, x_rev, energy_slope = self.x_chain(x_hat, rng)
        lap("x-chain")

        # MCMC inference
        mean, log_var = self.inference(x)
        z_hat = (mean + torch.exp(0.5 * log_var) * randn_like(mean, rng)).detach()
        lap("inference")
        z_rev = self.z_chain(z_hat, x, rng)
        lap("z-chain")

        # Learn the generator
        paper_weight = 1 / (2 * cfg.sigma**2)
        w_data = paper_weight if cfg.generator_data_weight is None else cfg.generator_data_weight
        w_sample = paper_weight if cfg.generator_sample_weight is None else cfg.generator_sample_weight
        data_error = squared_error(x, self.generator(z_rev)).mean()
        sample_error = squared_error(x_rev, x_hat).mean()
        norm_generator = self.update("generator", w_data * data_error + w_sample * sample_error)
        lap("generator")

        # Learn the inference model
        data_nll = gaussian_nll(z_rev, mean, log_var)
        sample_nll = gaussian_nll(z, *self.inference(x_rev))
        loss = cfg.inference_data_weight * data_nll + cfg.inference_sample_weight * sample_nll
        norm_inference = self.update("inference", loss)
        lap("inference")

        # Learn the EBM
        negatives = x_rev
        if cfg.second_x_chain:  # the authors' code: fresh negatives from the updated generator
            with torch.no_grad():
                x_hat = self.generator(z)
            lap("generator")
            _, negatives, _ = self.x_chain(x_hat, rng)
            lap("x-chain")
        images = [x, negatives]
        if cfg.energy_augment:
            pairs = torch.stack(images, 1).flatten(0, 1)
            images = list(random_transform(pairs, cfg.energy_augment, rng)(pairs).unflatten(0, (-1, 2)).unbind(1))
        if cfg.energy_consistency:
            images += random_shifts(images[0], images[1], cfg.energy_shift, rng)
        e_data, e_sample, *e_shifted = self.energy(torch.cat(images)).split(len(x))
        energy_gap = e_sample.mean() - e_data.mean()
        loss = cfg.energy_l2 * (e_data.square().mean() + e_sample.square().mean()) - energy_gap
        for energy, shifted in zip((e_data, e_sample), e_shifted, strict=False):
            loss = loss + cfg.energy_consistency * ((energy - shifted) ** 2).mean()
        norm_energy = self.update("energy", cfg.energy_weight * loss)
        lap("energy")

        return {
            "energy_data": e_data.mean().detach(),
            "energy_sample": e_sample.mean().detach(),
            "energy_gap": energy_gap.detach(),
            "reconstruction_mse": data_error.detach() / x[0].numel(),
            "energy_slope": energy_slope,
            "x_displacement_rms": (x_rev - x_start).square().flatten(1).mean(1).sqrt().mean(),
            "z_displacement_rms": (z_rev - z_hat).square().flatten(1).mean(1).sqrt().mean(),
            "inference_data_nll": data_nll.detach(),
            "inference_sample_nll": sample_nll.detach(),
            "grad_norm_generator": norm_generator,
            "grad_norm_inference": norm_inference,
            "grad_norm_energy": norm_energy,
        }

    def x_chain(self, x_hat: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The initial state, the state after k_x Langevin steps on E, and the mean |dE/dx| along the way."""
        x_start = x_hat.detach()
        if self.cfg.start_noise > 0:
            x_start = x_start + self.cfg.start_noise * randn_like(x_start, rng)
        transform: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
        if self.cfg.energy_augment:
            transform = random_transform(x_start, self.cfg.energy_augment, rng)
        self.energy.eval()  # no power iterations of the spectral norm
        slopes: list[Tensor] = []
        x_rev = langevin(x_start, lambda x: self.energy(transform(x)), self.cfg.x_chain, rng, slopes)
        self.energy.train()
        return x_start, x_rev, torch.stack(slopes).mean() if slopes else x_start.new_zeros(())

    def z_chain(self, z_hat: Tensor, x: Tensor, rng: torch.Generator) -> Tensor:
        """z after k_z Langevin steps on p(z|x)."""

        def negative_log_joint(z: Tensor) -> Tensor:
            return squared_error(x, self.generator(z)) / (2 * self.cfg.sigma**2) + 0.5 * z.square().sum(1)

        return langevin(z_hat, negative_log_joint, self.cfg.z_chain, rng)

    def update(self, name: str, loss: Tensor) -> Tensor:
        """One optimizer step of a network; returns the gradient norm."""
        self.optimizers[name].zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.nets[name].parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.optimizers[name].step()
        return norm


def langevin(
    state: Tensor,
    potential: Callable[[Tensor], Tensor],
    chain: Any,
    rng: torch.Generator,
    slopes: list[Tensor] | None = None,
) -> Tensor:
    """`chain.steps` Langevin steps on exp(-potential); appends the gradients' mean norm of each step to `slopes`."""
    if chain.grad_clip is not None or chain.metropolis:
        raise ValueError("the reference supports neither grad_clip nor metropolis")
    noise_std = (2 * chain.step_size * chain.temperature) ** 0.5
    for _ in range(chain.steps):
        state = state.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(potential(state).sum(), state)
        if slopes is not None:
            slopes.append(gradient.flatten(1).norm(dim=1).mean())
        state = state.detach() - chain.step_size * gradient
        if noise_std > 0:
            state = state + noise_std * randn_like(state, rng)
        if chain.clamp is not None:
            state = state.clamp(-chain.clamp, chain.clamp)
    return state.detach()


def random_shifts(x: Tensor, x_rev: Tensor, max_pixels: int, rng: torch.Generator) -> list[Tensor]:
    """Both batches, each image shifted by up to `max_pixels`, as products with one-hot matrices."""
    offsets = torch.randint(2 * max_pixels + 1, (len(x), 2, 2), device=x.device, generator=rng)  # image, batch, axis
    shifted = []
    for batch, images in enumerate((x, x_rev)):
        padded = F.pad(images, [max_pixels] * 4, mode="reflect")
        rows, columns = (
            torch.eye(n + 2 * max_pixels, device=x.device)[
                offsets[:, batch, axis, None] + torch.arange(n, device=x.device)
            ]
            for axis, n in enumerate(x.shape[2:])
        )
        shifted.append(torch.einsum("bhi,bcij,bwj->bchw", rows, padded, columns))
    return shifted


def random_transform(x: Tensor, probability: float, rng: torch.Generator) -> Callable[[Tensor], Tensor]:
    """One random transformation per image of x, after Karras et al. (2020), by torch's sampling of an affine grid."""
    draw: dict[str, Any] = {"device": x.device, "dtype": x.dtype, "generator": rng}
    on = torch.rand(len(x), 10, **draw) < probability
    uniform, normal = torch.rand(len(x), 5, **draw), torch.randn(len(x), 7, **draw)
    side, ln2, zero = x.shape[-1], math.log(2), x.new_zeros(len(x))
    # Positions are (column, row, 1) in [-1, 1]; an output pixel at p shows the image at grid @ p.
    zoom = torch.where(on[:, 2], 2 ** (0.2 * normal[:, 0]), 1)
    stretch = torch.where(on[:, 3], 2 ** (0.2 * normal[:, 1]), 1)
    pixels = torch.where(on[:, 4, None], ((uniform[:, 2:4] - 0.5) * 2 * 0.125 * side).round(), 0)
    pixels = pixels + torch.where(on[:, 5, None], 0.125 * side * normal[:, 2:4], 0)
    turns = torch.where(on[:, 1], torch.floor(4 * uniform[:, 1]), 0)
    mirror = torch.where(on[:, 0] & (uniform[:, 0] > 0.5), -1, 1)
    row_sign, column_sign = torch.where(turns >= 2, -1, 1), torch.where((turns == 1) | (turns == 2), -1, 1) * mirror
    rows = torch.stack([zero, row_sign * zoom * stretch, pixels[:, 0] * 2 / side], 1)
    columns = torch.stack([column_sign * zoom / stretch, zero, pixels[:, 1] * 2 / side], 1)
    upright = (turns % 2 == 0)[:, None, None]
    grid = torch.where(upright, torch.stack([columns, rows], 1), torch.stack([rows, columns], 1))
    brightness = torch.where(on[:, 6], 0.2 * normal[:, 4], 0)[:, None, None, None]
    contrast = torch.where(on[:, 7], torch.exp(0.5 * ln2 * normal[:, 5]), 1)[:, None, None, None]
    angle = torch.where(on[:, 8], 2 * math.pi * uniform[:, 4], 0)[:, None, None]
    saturation = torch.where(on[:, 9], torch.exp(ln2 * normal[:, 6]), 1)[:, None, None]

    def transform(images: Tensor) -> Tensor:
        where = F.affine_grid(grid, list(images.shape), align_corners=False)
        moved = F.grid_sample(images, where, padding_mode="reflection", align_corners=False) + brightness
        if images.shape[1] == 3:
            red, green, blue = moved.unbind(1)
            grey = (red + green + blue) / 3
            turned = ((blue - green), (red - blue), (green - red))  # a quarter turn about the grey axis, times sqrt(3)
            moved = torch.stack(
                [
                    grey + saturation * ((channel - grey) * angle.cos() + other * angle.sin() / math.sqrt(3))
                    for channel, other in zip((red, green, blue), turned, strict=True)
                ],
                1,
            )
        return contrast * moved

    return transform


def squared_error(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|^2 of each image, (B,)."""
    return (a - b).square().flatten(1).sum(1)


def gaussian_nll(z: Tensor, mean: Tensor, log_var: Tensor) -> Tensor:
    """Mean over the batch of -log N(z; mean, exp(log_var)), without its constant."""
    return 0.5 * (log_var + (z - mean).square() * torch.exp(-log_var)).sum(1).mean()


def randn_like(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """torch.randn_like, which takes no generator."""
    return torch.randn(tensor.shape, device=tensor.device, dtype=tensor.dtype, generator=rng)
