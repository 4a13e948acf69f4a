from types import SimpleNamespace

import pytest
import torch

from dualmcmc import rng, settings
from dualmcmc.augment import shifted
from dualmcmc.config import Teaching
from dualmcmc.methods.dual_mcmc import energy_loss
from tests.conftest import assert_refused


def images(count=500, size=8):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def found_at(image, moved, most):
    """The moves of `image` that give `moved`, tried one by one."""
    size, wide = image.shape[-1], torch.nn.functional.pad(image[None], [most] * 4, mode="reflect")[0]
    places = range(2 * most + 1)
    return [(r, c) for r in places for c in places if torch.equal(wide[:, r:, c:][:, :size, :size], moved)]


def test_every_move_is_as_likely_and_nothing_else_happens():
    x = images()
    moved = shifted(x, 1, torch.Generator().manual_seed(0))
    places = [found_at(before, after, 1) for before, after in zip(x, moved, strict=True)]
    assert all(len(place) == 1 for place in places)
    counts = torch.tensor([sum(place == [(r, c)] for place in places) for r in range(3) for c in range(3)])
    assert (counts - 500 / 9).abs().max() < 4 * (500 / 9) ** 0.5
    assert counts[4] > 0  # not moved at all


def test_the_largest_move_there_is():
    x = images(50, 4)
    moved = shifted(x, 3, torch.Generator().manual_seed(0))
    assert all(found_at(before, after, 3) for before, after in zip(x, moved, strict=True))


def test_processes_share_what_one_would_draw():
    x = images(6)
    whole = shifted(x, 2, torch.Generator().manual_seed(3))
    parts = [shifted(x[3 * r :][:3], 2, rng.Share(torch.Generator().manual_seed(3), r, 2)) for r in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def consistency(energy, x, x_rev, weight=3.0, most=1):
    """What `energy_consistency` adds to E's loss."""
    trio, source = SimpleNamespace(energy=energy), torch.Generator().manual_seed(0)
    without, cfg = Teaching(), Teaching(energy_consistency=weight, energy_shift=most)
    return energy_loss(trio, x, x_rev, source, cfg)[0] - energy_loss(trio, x, x_rev, source, without)[0]


def test_consistency_is_the_squared_change_of_energy_under_a_move_of_data_and_of_samples():
    x, x_rev = torch.zeros(4000, 1, 8, 8), torch.zeros(4000, 1, 8, 8)
    x[:, :, 3, 3], x_rev[:, :, 3, 3] = 1, 2
    added = consistency(lambda image: image[:, 0, 3].sum(1), x, x_rev)  # two moves of three change the row
    assert added == pytest.approx(3 * (1 + 4) * 2 / 3, rel=0.05)


def test_consistency_asks_nothing_of_an_energy_that_moves_do_not_change():
    x = images(50)
    x[:, :, :2], x[:, :, -2:], x[..., :2], x[..., -2:] = (0,) * 4  # a move by one loses nothing
    total, peak = (lambda image: image.sum((1, 2, 3))), (lambda image: image[:, 0, 4, 4])
    assert consistency(total, x, -x).abs() < 1e-6 < consistency(peak, x, -x)


@pytest.mark.parametrize("preset", ["digits", "cifar10-simple"])
def test_it_is_refused_where_nothing_would_be_left(call, preset):
    size, on = settings.load_config(preset).data.size, "teaching.energy_consistency=1"
    settings.load_config(preset, [on, f"teaching.energy_shift={size - 1}"])
    refused = call("config", preset, on, f"teaching.energy_shift={size}")
    assert_refused(refused, f"teaching.energy_shift={size}", "use less")
