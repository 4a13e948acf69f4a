import pytest
import torch

import dualmcmc
from dualmcmc.errors import UserError
from dualmcmc.pictures import from_uint8, to_uint8
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.revise import film_x, film_z, picture


def test_the_film_of_x(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["sampling.steps=30"])
    film = film_x(run, 32, every=3)
    assert film.at == list(range(0, 31, 3))
    assert film.values.shape == (31, 32)
    assert film.means()[-1] < film.means()[0]  # the chain lowers the energy
    assert len(film.frames) == 11
    start = from_uint8(film.frames[0])  # bytes of where it began
    assert run.energy(start).mean() == pytest.approx(film.means()[0], rel=0.05, abs=0.02)


def test_the_film_of_z(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["teaching.z_chain.steps=10"])
    images = images_for(run, None).store.first(32)
    film = film_z(run, images, every=1)
    assert film.at == list(range(11))
    assert len(film.frames) == 12  # and the originals
    assert torch.equal(film.frames[-1], images)
    x = from_uint8(images)
    assert torch.equal(film.frames[0], to_uint8(run.reconstruct(x, steps=0)))
    assert film.means()[0] == pytest.approx(float((run.reconstruct(x, steps=0) - x).square().mean()), rel=1e-4)
    assert film.means()[-1] < film.means()[0]  # the chain lowers the error


def test_how_many_frames(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["sampling.steps=70"])
    assert len(film_x(run, 2).frames) <= 11
    with pytest.raises(UserError, match="--every"):
        film_x(run, 2, every=0)


def test_the_picture_has_both(learned):
    x = film_x(learned, 4, 1)
    z = film_z(learned, images_for(learned, None).store.first(4))
    assert picture(x, z, 2).shape[2] > picture(x, None, 2).shape[2]
    assert x.strip(2).shape[1] < x.strip(4).shape[1]
