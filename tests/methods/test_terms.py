import pytest
import torch

from dualmcmc import config_io
from dualmcmc.config import Teaching
from dualmcmc.methods.augment import draw_augmentation
from dualmcmc.methods.terms import energy_stats, paired_energies, random_shift, regularize, sample_energy
from dualmcmc.rng import SharedGenerator, make_generator
from dualmcmc.utils.errors import UserError


def make_images(count=500, size=8):
    return torch.rand(count, 3, size, size, generator=make_generator(7))


def find_shifts(image, shifted, max_pixels):
    """The shifts of `image` that give `shifted`, by trying all."""
    size, padded = image.shape[-1], torch.nn.functional.pad(image[None], [max_pixels] * 4, mode="reflect")[0]
    offsets = range(2 * max_pixels + 1)
    return [(r, c) for r in offsets for c in offsets if torch.equal(padded[:, r:, c:][:, :size, :size], shifted)]


def test_random_shifts_are_uniform():
    x = make_images()
    shifted = random_shift(x, 1, make_generator(0))
    shifts = [find_shifts(before, after, 1) for before, after in zip(x, shifted, strict=True)]
    assert all(len(shift) == 1 for shift in shifts)
    counts = torch.tensor([sum(shift == [(r, c)] for shift in shifts) for r in range(3) for c in range(3)])
    assert (counts - 500 / 9).abs().max() < 4 * (500 / 9) ** 0.5
    assert counts[4] > 0  # no shift at all


def test_largest_possible_shift():
    x = make_images(50, 4)
    shifted = random_shift(x, 3, make_generator(0))
    assert all(find_shifts(before, after, 3) for before, after in zip(x, shifted, strict=True))


def test_ranks_draw_the_shifts_of_one_process():
    x = make_images(6)
    whole = random_shift(x, 2, make_generator(3))
    parts = [random_shift(x[3 * r :][:3], 2, SharedGenerator(make_generator(3), r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def consistency(energy, x, x_rev):
    """What `energy_consistency` adds to E's loss."""
    cfg = Teaching(energy_consistency=3.0, energy_shift=1)
    return regularize(torch.zeros(()), paired_energies(energy, x, x_rev, cfg, make_generator(0)), cfg)


def test_consistency_is_the_squared_change_of_energy():
    x, x_rev = torch.zeros(4000, 1, 8, 8), torch.zeros(4000, 1, 8, 8)
    x[:, :, 3, 3], x_rev[:, :, 3, 3] = 1, 2
    added = consistency(lambda image: image[:, 0, 3].sum(1), x, x_rev)  # two shifts of three change the row
    assert added == pytest.approx(3 * (1 + 4) * 2 / 3, rel=0.05)


def test_consistency_of_an_invariant_energy_is_zero():
    x = make_images(50)
    x[:, :, :2], x[:, :, -2:], x[..., :2], x[..., -2:] = (0,) * 4  # a shift by one pixel loses nothing
    assert consistency(lambda image: image.sum((1, 2, 3)), x, -x).abs() < 1e-6
    assert consistency(lambda image: image[:, 0, 4, 4], x, -x) > 1e-6


def test_energies_are_evaluated_in_one_batch_of_pairs():
    x, x_rev, sizes = make_images(5), make_images(5) + 1, []

    def energy(images):
        sizes.append(len(images))
        return images.mean((1, 2, 3))

    e = paired_energies(energy, x, x_rev, Teaching(energy_l2=0.5), None)
    assert sizes == [10]
    assert torch.equal(e.data, x.mean((1, 2, 3)))
    assert torch.equal(e.sample, x_rev.mean((1, 2, 3)))
    assert e.shifted is None
    assert energy_stats(e)["energy_gap"] == pytest.approx(1)


@pytest.mark.parametrize("preset", ["digits", "cifar10-simple"])
def test_shift_must_be_smaller_than_the_image(preset):
    size, on = config_io.load_config(preset).data.size, "teaching.energy_consistency=1"
    config_io.load_config(preset, [on, f"teaching.energy_shift={size - 1}"])
    with pytest.raises(UserError, match=rf"teaching\.energy_shift={size} must be smaller than data\.size={size}"):
        config_io.load_config(preset, [on, f"teaching.energy_shift={size}"])


@pytest.mark.parametrize("augment", [0.0, 0.7])
def test_sample_energy_has_the_gradient_of_the_transformed_samples_alone(augment):
    x, scale = make_images(6).double().requires_grad_(), torch.nn.Parameter(torch.tensor(2.0))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    net.double()
    found = sample_energy(net, scale * x, Teaching(energy_augment=augment), make_generator(0))
    drawn = draw_augmentation(x, augment, make_generator(0))
    expected = net(drawn(scale * x)).flatten()
    with torch.no_grad():  # as compilation does
        assert torch.equal(sample_energy(net, scale * x, Teaching(energy_augment=augment), make_generator(0)), found)
    assert torch.allclose(found, expected)
    for ours, plain in zip(*(torch.autograd.grad(e.sum(), [x, scale]) for e in (found, expected)), strict=True):
        assert torch.allclose(ours, plain)
    assert all(
        g is None
        for g in torch.autograd.grad(
            sample_energy(net, scale * x, Teaching(), None).sum(), list(net.parameters()), allow_unused=True
        )
    )
