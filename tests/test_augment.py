import pytest
import torch

from dualmcmc import rng, settings
from dualmcmc.augment import shifted
from dualmcmc.engine.state import TrainState
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


def test_image_and_sample_of_a_pair_are_moved_alike():
    config = settings.load_config("digits", ["teaching.energy_shift=2", "nets.energy_width=4"])
    state = TrainState(config, torch.device("cpu"))
    state.trio.eval()  # spectral norms hold still
    x = images(50)[:, :1] * 2 - 1
    _, stats = energy_loss(state.trio, x, x, state.rng, config.teaching)
    assert stats["energy_gap"].abs() < 1e-6
    assert not torch.isclose(stats["energy_data"], state.trio.energy(x).mean(), rtol=1e-4)


@pytest.mark.parametrize("preset", ["digits", "cifar10-simple"])
def test_it_is_refused_where_nothing_would_be_left(call, preset):
    size = settings.load_config(preset).data.size
    settings.load_config(preset, [f"teaching.energy_shift={size - 1}"])
    assert_refused(call("config", preset, f"teaching.energy_shift={size}"), f"teaching.energy_shift={size}", "use less")
