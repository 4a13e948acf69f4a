import pytest
import torch

import dualmcmc
from dualmcmc.data.store import Memory
from dualmcmc.metrics.pixels import psnr
from dualmcmc.pictures import from_uint8
from dualmcmc.tasks.inpaint import STAGES, complete, inpaint, picture
from dualmcmc.tasks.inputs import images_for
from dualmcmc.tasks.masks import observed


@pytest.fixture
def run(learned_folder):
    return dualmcmc.load(learned_folder, "cpu", overrides=["teaching.z_chain.steps=30"])


@pytest.fixture
def x(run):
    return from_uint8(images_for(run, None).store.first(40))


@pytest.mark.parametrize("word", ["M40", "R30"])
def test_observed_pixels_are_untouched_and_hidden_ones_are_filled(run, x, word):
    seen = observed(word, len(x), 8)
    for completed, _ in complete(run, x, seen):
        assert torch.equal(torch.where(seen, completed, 0), torch.where(seen, x, 0))
        assert not torch.equal(completed, torch.where(seen, x, 0))
    stages = complete(run, x, seen)
    moved = stages[2][0] != stages[1][0]  # by the x-chain
    assert moved[(~seen).expand_as(moved)].all()
    assert not moved[seen.expand_as(moved)].any()


def test_what_each_stage_is(run, x):
    seen = observed("M40", len(x), 8)
    occluded = torch.where(seen, x, 0.0)  # hidden pixels at mid-grey
    first, second, third = _repeat(run, x, seen)
    z = run.infer(occluded).mean
    assert torch.allclose(first[1], run.generate(z))
    run.rng.manual_seed(3)
    z = run.revise_z(z, occluded, observed=seen)
    assert torch.allclose(second[1], run.generate(z))
    assert torch.allclose(third[0], run.revise_x(second[0], observed=seen), atol=1e-2)  # the noise is small
    assert torch.allclose(third[1], run.revise_x(second[1]), atol=1e-2)
    assert not torch.allclose(third[1], third[0], atol=0.1)


def test_one_mask_for_all_images(run, x):
    run = dualmcmc.load(run.file, "cpu", overrides=["sampling.batch=7"])
    seen = observed("M40", 1, 8)
    assert torch.equal(_repeat(run, x, seen)[2][0], _repeat(run, x, seen.expand(len(x), -1, -1, -1))[2][0])


def test_only_observed_pixels_are_used(run, x):
    """What is hidden may be anything: the recovery is the same."""
    seen = observed("M40", len(x), 8)
    other = torch.where(seen, x, torch.rand_like(x) * 2 - 1)
    for first, second in zip(_repeat(run, x, seen), _repeat(run, other, seen), strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def _repeat(run, x, seen):
    run.rng.manual_seed(3)
    return complete(run, x, seen)


def test_the_z_chain_helps_and_numbers_are_what_they_say(run, x):
    store = Memory(images_for(run, None).store.first(200))
    result = inpaint(run, store, "R30", keep=5)
    assert result.hidden == pytest.approx(19 / 64)
    for kind in (result.generated, result.completed):
        assert kind["z_chain"]["psnr"] > kind["inference"]["psnr"]
        assert kind["z_chain"]["ssim"] > kind["inference"]["ssim"]
    for stage in STAGES:
        assert result.completed[stage]["psnr"] > result.generated[stage]["psnr"]  # the observed pixels are right
    seen = observed("R30", 200, 8, run.seed)
    x = from_uint8(store.tensor())
    first = complete(run, x, seen)[0]
    assert result.completed["inference"]["psnr"] == pytest.approx(float(psnr(x, first[0]).mean()), rel=1e-5)
    assert result.generated["inference"]["psnr"] == pytest.approx(float(psnr(x, first[1]).mean()), rel=1e-5)
    error = (x - first[0])[(~seen).expand_as(x)].square().mean()  # of the hidden pixels
    assert result.completed["inference"]["psnr_hidden"] == pytest.approx(float(10 * torch.log10(4 / error)), rel=1e-5)
    assert [len(part) for part in (result.original, result.occluded, *result.stages)] == [5] * 5
    assert picture(result).shape[0] == 1


def test_masks_do_not_depend_on_the_batch(learned_folder):
    found = []
    for size in (7, 50):
        run = dualmcmc.load(learned_folder, "cpu", overrides=[f"sampling.batch={size}"])
        found.append(inpaint(run, Memory(images_for(run, None).store.first(20)), "R20"))
    assert torch.equal(found[0].occluded, found[1].occluded)
    assert found[0].completed["inference"] == pytest.approx(found[1].completed["inference"], rel=1e-4)
