"""Networks of a user's own, for tests: on points in the plane, and on greyscale images of 8x8 pixels."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from dualmcmc import Trio
from tests.conftest import tiny

LATENT_DIM = 3
PLANE = (
    f"teaching.latent_dim={LATENT_DIM}", "teaching.sigma=0.2", "teaching.x_chain.step_size=0.01",
    "teaching.x_chain.temperature=1", "teaching.z_chain.step_size=0.002", "train.sample_every=16",
)  # fmt: skip


class PlaneInference(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 2 * LATENT_DIM))

    def forward(self, x):
        return self.net(x).chunk(2, dim=1)


def plane_networks():
    """Modules without convolutions, of which E returns (B, 1)."""
    energy = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(LATENT_DIM, 16), nn.SiLU(), nn.Linear(16, 2))
    return Trio(energy, generator, PlaneInference())


def plane_config(*overrides):
    return tiny(*PLANE, *overrides)


def points(count=200, seed=0):
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)) * torch.tensor([2.0, 0.5])


class Tied(nn.Module):
    """E with a normalised convolution, the same twice, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Conv2d(1, 8, 3, padding="same"), spectral_norm(nn.Conv2d(8, 8, 3, padding=1))
        self.again, self.norm, self.head = self.conv, nn.GroupNorm(2, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        x = self.conv(torch.relu(self.first(x)))
        x = self.again(torch.relu(self.norm(x)))
        return self.head(x.mean((2, 3)) * self.scale)[:, 0]


class ImageGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.norm, self.drop = nn.Linear(4, 8 * 16), nn.BatchNorm2d(8), nn.Dropout(0.1)
        self.up = nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)

    def forward(self, z):
        return torch.tanh(self.up(self.drop(torch.relu(self.norm(self.start(z).unflatten(1, (8, 4, 4)))))))


class ImageInference(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.mean, self.log_var = nn.utils.spectral_norm(nn.Linear(128, 4)), nn.Linear(128, 4)  # the older one

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.log_var(h)


def image_networks():
    """Modules with shared weights, BatchNorm, dropout and both spectral norms, for the settings of `tiny`."""
    return Trio(Tied(), ImageGenerator(), ImageInference())


class BreaksCompiler(nn.Module):
    """An energy that depends on a number in Python."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        scale = 2.0 if float(x.detach().sum()) > 0 else 1.0
        return self.head(x.flatten(1)) * scale
