import pytest
import torch

import dualmcmc
from dualmcmc.tasks.chains import long_chains, picture, trace_x, trace_z
from dualmcmc.tasks.inputs import images_for
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, strip, to_uint8


def test_x_chain(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["sampling.steps=30"])
    film = trace_x(run, 32, every=3)
    assert film.at == list(range(0, 31, 3))
    assert film.values.shape == (31, 32)
    assert film.means()[-1] < film.means()[0]  # the chain lowers the energy
    assert len(film.frames) == 11
    start = from_uint8(film.frames[0])  # rounded to uint8
    assert run.energy(start).mean() == pytest.approx(film.means()[0], rel=0.05, abs=0.02)


def test_z_chain(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["teaching.z_chain.steps=10"])
    images = images_for(run).store.first(32)
    film = trace_z(run, images, every=1)
    assert film.at == list(range(11))
    assert len(film.frames) == 12
    assert torch.equal(film.frames[-1], images)
    x = from_uint8(images)
    assert torch.equal(film.frames[0], to_uint8(run.reconstruct(x, steps=0)))
    assert film.means()[0] == pytest.approx(float((run.reconstruct(x, steps=0) - x).square().mean()), rel=1e-4)
    assert film.means()[-1] < film.means()[0]  # the chain lowers the error


def test_number_of_frames(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["sampling.steps=70"])
    assert len(trace_x(run, 2).frames) == 11
    with pytest.raises(UserError, match="--every"):
        trace_x(run, 2, every=0)


def test_picture(learned):
    x = trace_x(learned, 4, 1)
    z = trace_z(learned, images_for(learned).store.first(4))
    assert picture(x, z, 2).shape[2] > x.profile().shape[2] + z.profile().shape[2]
    assert picture(x, z, 2).shape[1] < picture(x, z, 4).shape[1]


def test_frames_have_their_steps_above_them(learned_folder):
    run = dualmcmc.load(learned_folder, "cpu", overrides=["sampling.steps=7", "teaching.z_chain.steps=2"])
    x, z = trace_x(run, 2, 3), trace_z(run, images_for(run).store.first(2))
    assert (x.caption, z.caption) == ("x-chain (7 steps)", "z-chain (2 steps)")
    assert torch.equal(x.strip(2), strip(x.frames, 2, ["step 0", "step 3", "step 6", "step 7"]))
    assert torch.equal(z.strip(2), strip(z.frames, 2, ["step 0", "step 1", "step 2", "image"]))


def test_long_chains(learned):
    result = long_chains(learned, 5, 100)
    numbers = result.numbers
    assert numbers["finite"]
    assert numbers["energy_end"] < numbers["energy_start"]
    assert 0 < numbers["displacement_rms_halfway"] < numbers["displacement_rms_end"]
    assert numbers["kept_at"] == list(range(0, 101, 10))
    assert numbers["r_hat"] > 1.01  # they still drift
    assert 1 < numbers["effective_sample_size"] < 5 * 51
    assert long_chains(learned, 5, 14).numbers["r_hat"] is not None
    assert long_chains(learned, 5, 13).numbers["r_hat"] is None  # seven states
    assert numbers["fraction_outside_range_at"][0] == 0  # tanh
    assert result.picture.shape[0] == 3
    with pytest.raises(UserError, match=r"at most sampling\.batch=500 chains"):
        long_chains(learned, 501, 10)
    for n, steps in ((0, 10), (5, 0)):
        with pytest.raises(UserError, match="at least one"):
            long_chains(learned, n, steps)


def test_long_chains_outside_the_pixel_range(learned, monkeypatch):
    def steep(x, steps, rng, trace):
        chain = dualmcmc.Chain(steps=steps, temperature=0)
        return dualmcmc.revise_x(lambda y: -y.sum((1, 2, 3)), x, chain, None, trace)

    monkeypatch.setattr(learned, "revise_x", steep)
    numbers = long_chains(learned, 3, 500).numbers
    assert numbers["max_abs_pixel"] == pytest.approx(5, abs=1.1)
    assert numbers["fraction_outside_range"] == 1
