"""The transformations of `energy_augment`. `tests/bench/test_reference.py` compares them with torch's grid sampling."""

import math

import pytest
import torch

from dualmcmc.config import Chain, Teaching
from dualmcmc.langevin import revise_x
from dualmcmc.methods import augment
from dualmcmc.methods.augment import Augmentation, AugmentedEnergy, draw_augmentation
from dualmcmc.methods.terms import augmented, paired_energies
from dualmcmc.rng import SharedGenerator, make_generator


def make_images(count=6, channels=3, side=8):
    return 2 * torch.rand(count, channels, side, side, generator=make_generator(7)) - 1


def transform(x, **parts):
    """x under an augmentation that is the identity but for these parts."""
    count, channels, side, _ = x.shape
    identity = Augmentation(
        torch.zeros(count, 1, 1, 1, dtype=torch.bool),
        torch.eye(side).expand(count, 1, -1, -1),
        torch.eye(side).expand(count, 1, -1, -1),
        torch.zeros(count, 1, 1, 1),
        torch.eye(channels).expand(count, -1, -1),
    )
    return identity._replace(**parts)(x)


def resampled(x, scale, shift):
    """x with its columns resampled."""
    count = len(x)
    matrix = augment._resampling_matrix(x.shape[-1], torch.full((count,), scale), torch.full((count,), shift))
    return transform(x, columns=matrix[:, None])


def coloured(x, contrast=1.0, hue=0.0, saturation=1.0):
    parts = (torch.full((len(x),), value) for value in (contrast, hue, saturation))
    return transform(x, colour=augment._colour_matrix(x.shape[1], *parts))


@pytest.mark.parametrize("channels", [1, 3])
def test_probability_zero_is_the_identity(channels):
    x = make_images(channels=channels)
    assert torch.equal(draw_augmentation(x, 0.0, make_generator(0))(x), x)


@pytest.mark.parametrize("channels", [1, 3])
def test_each_part_applies_with_the_given_probability(channels):
    x = make_images(4000, channels)
    changed = (draw_augmentation(x, 0.1, make_generator(0))(x) - x).flatten(1).abs().amax(1) > 1e-6
    # Half of the mirrorings change nothing, nor do a quarter of the turns (by 0) and of the whole-pixel shifts (0, 0).
    effective = [1 / 2, 3 / 4, 3 / 4, *[1] * 5, *([1] * 2 if channels == 3 else [])]
    unchanged = math.prod(1 - 0.1 * part for part in effective)
    assert changed.float().mean().item() == pytest.approx(1 - unchanged, abs=4 * (0.25 / 4000) ** 0.5)


def test_whole_pixel_shift_reflects_at_the_edge():
    x = make_images()
    shifted = resampled(x, 1.0, 2.0)
    assert torch.allclose(shifted[..., :-2], x[..., 2:])
    assert torch.allclose(shifted[..., -2:], x[..., -2:].flip(-1))


def test_half_pixel_shift_averages_neighbours():
    x = make_images()
    assert torch.allclose(resampled(x, 1.0, 0.5)[..., :-1], (x[..., :-1] + x[..., 1:]) / 2, atol=1e-6)


def test_negative_scale_mirrors():
    x = make_images()
    assert torch.allclose(resampled(x, -1.0, 0.0), x.flip(-1))


def test_zoom_keeps_the_centre():
    ramp = torch.linspace(-1, 1, 8).expand(1, 1, 8, 8)
    assert torch.allclose(resampled(ramp, 0.5, 0.0), 0.5 * ramp, atol=1e-6)


def test_quarter_turns_are_rotations(monkeypatch):
    x = make_images(400, side=4)

    def only_turns(shape, like, rng):
        drawn = torch.rand(shape, generator=rng)
        if shape[1] == 10:
            drawn = torch.ones(shape)
            drawn[:, 1] = 0  # below any probability
        return drawn

    monkeypatch.setattr(augment, "rand", only_turns)
    turned = draw_augmentation(x, 0.5, make_generator(0))(x)
    rotations = torch.stack([x.rot90(turns, (2, 3)) for turns in range(4)])
    matches = (rotations == turned).flatten(2).all(2)
    assert matches.sum(0).eq(1).all()
    assert (matches.float().mean(1) - 0.25).abs().max() < 0.1


def test_colours_turn_about_grey():
    x = make_images()
    grey = x.mean(1, keepdim=True)
    assert torch.allclose(coloured(x, hue=2 * math.pi / 3), x.roll(1, 1), atol=1e-6)
    assert torch.allclose(coloured(x, saturation=0.0), grey.expand_as(x), atol=1e-6)
    assert torch.allclose(coloured(x, contrast=2.0), 2 * x)
    assert torch.allclose(coloured(x, hue=1.0, saturation=3.0).mean(1, keepdim=True), grey, atol=1e-6)


def test_gradient_is_that_of_the_energy_at_the_transformed_image():
    x = make_images().double()
    drawn = draw_augmentation(x, 0.7, make_generator(0))
    weight = torch.randn(x[0].numel(), dtype=torch.float64, generator=make_generator(1))
    energy = AugmentedEnergy(lambda images: (images.flatten(1) @ weight).tanh(), drawn)
    assert torch.autograd.gradcheck(energy, x.requires_grad_())


def test_ranks_draw_the_transformations_of_one_process():
    x = make_images()
    whole = draw_augmentation(x, 0.5, make_generator(3))(x)
    parts = [x[3 * rank :][:3] for rank in range(2)]
    drawn = [
        draw_augmentation(part, 0.5, SharedGenerator(make_generator(3), r, 2))(part) for r, part in enumerate(parts)
    ]
    assert torch.equal(torch.cat(drawn), whole)


class Energy(torch.nn.Module):
    """Counts the weight gradients that a chain would compute."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3 * 8 * 8, generator=make_generator(1)))
        self.trainable = []

    def forward(self, x):
        self.trainable.append(self.weight.requires_grad)
        return x.flatten(1) @ self.weight


def test_chain_transforms_once_and_freezes_the_energy():
    x, energy, cfg = make_images(), Energy(), Teaching(energy_augment=0.7)
    chain = Chain(steps=3, step_size=0.1, temperature=0)
    x_rev = revise_x(augmented(energy, x, cfg, make_generator(0)), x, chain)
    drawn = draw_augmentation(x, 0.7, make_generator(0))
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(drawn(leaf)).sum(), leaf)
    assert torch.allclose(x_rev, x - 0.3 * gradient, atol=1e-6)  # E is linear: three equal steps
    assert energy.trainable == [False] * 3 + [True]


def test_without_augmentation_the_energy_is_itself():
    energy = Energy()
    assert augmented(energy, make_images(), Teaching(), None) is energy


def test_data_and_samples_are_transformed_independently_before_the_shift():
    x, seen = make_images(), []

    def energy(images):
        seen.append(images)
        return images.mean((1, 2, 3))

    cfg = Teaching(energy_augment=0.6, energy_consistency=1, energy_shift=1)
    paired_energies(energy, x, x, cfg, make_generator(0))
    pairs = x.repeat_interleave(2, 0)
    expected = draw_augmentation(pairs, 0.6, make_generator(0))(pairs)
    assert torch.equal(seen[0][: len(pairs)], expected)
    assert not torch.equal(expected[0::2], expected[1::2])
    assert len(seen[0]) == 4 * len(x)


def test_ramp_rises_in_ten_steps():
    cfg = Teaching(energy_augment=0.5, energy_augment_ramp=1000)
    values = [cfg.at(images).energy_augment for images in range(0, 1201, 50)]
    assert values == pytest.approx([0.05 * min(images // 100, 10) for images in range(0, 1201, 50)])
    assert cfg.at(1000) is cfg
    assert Teaching(energy_augment=0.5).at(0).energy_augment == 0.5


@pytest.mark.parametrize("shape", [(4, 2), (4, 3, 8, 6)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="energy_augment needs square images"):
        draw_augmentation(torch.zeros(shape), 0.5, make_generator(0))
