import numpy as np
import pytest
import torch
from PIL import Image

import dualmcmc
from dualmcmc.data.store import MemoryStore
from dualmcmc.metrics.pixels import psnr
from dualmcmc.tasks.inpaint import MASKS, STAGES, complete, inpaint, make_mask, picture
from dualmcmc.tasks.inputs import images_for
from dualmcmc.utils.errors import UserError
from dualmcmc.utils.images import from_uint8, grid, side_by_side


@pytest.fixture
def run(learned_folder):
    return dualmcmc.load(learned_folder, "cpu", overrides=["teaching.z_chain.steps=30"])


@pytest.fixture
def x(run):
    return from_uint8(images_for(run).store.first(40))


@pytest.mark.parametrize("word", ["M40", "R30"])
def test_observed_pixels_are_kept_and_hidden_ones_filled(run, x, word):
    observed = make_mask(word, len(x), 8)
    for completed, _ in complete(run, x, observed):
        assert torch.equal(torch.where(observed, completed, 0), torch.where(observed, x, 0))
        assert not torch.equal(completed, torch.where(observed, x, 0))
    stages = complete(run, x, observed)
    changed = stages[2][0] != stages[1][0]  # by the x-chain
    assert changed[(~observed).expand_as(changed)].all()
    assert not changed[observed.expand_as(changed)].any()


def test_stages(run, x):
    observed = make_mask("M40", len(x), 8)
    occluded = torch.where(observed, x, 0.0)  # hidden pixels at mid-grey
    first, second, third = seeded_complete(run, x, observed)
    z = run.infer(occluded).mean
    assert torch.allclose(first[1], run.generate(z))
    assert torch.allclose(second[1], run.generate(run.revise_z(z, occluded, observed=observed, temperature=0.0)))
    run.rng.manual_seed(3)
    assert torch.equal(third[0], run.revise_x(second[0], observed=observed))
    assert torch.equal(third[1], run.revise_x(second[1]))
    assert not torch.allclose(third[1], third[0], atol=0.1)


def test_temperature_of_the_z_chain(run, x):
    observed = make_mask("M40", len(x), 8)
    z = run.infer(torch.where(observed, x, 0.0)).mean
    rng = torch.Generator()
    sampled = run.revise_z(z, torch.where(observed, x, 0.0), rng=rng.manual_seed(3), observed=observed)
    for warm in (None, 1.0):  # the run's setting is 1
        _, (_, second), _ = complete(run, x, observed, rng.manual_seed(3), temperature=warm)
        assert torch.equal(second, run.generate(sampled))


def test_both_chains_are_compiled(run, monkeypatch):
    prepared = []
    monkeypatch.setattr(run, "prepare", lambda n, progress, z_chain=False: prepared.append((n, z_chain)))
    inpaint(run, MemoryStore(images_for(run).store.first(3)), "M20")
    assert sorted(prepared) == [(3, False), (3, True)]


def test_mask_shared_by_all_images(run, x):
    run = dualmcmc.load(run.file, "cpu", overrides=["sampling.batch=7"])
    observed = make_mask("M40", 1, 8)
    expanded = observed.expand(len(x), -1, -1, -1)
    assert torch.equal(seeded_complete(run, x, observed)[2][0], seeded_complete(run, x, expanded)[2][0])


def test_only_observed_pixels_are_used(run, x):
    """Other values of the hidden pixels give the same result."""
    observed = make_mask("M40", len(x), 8)
    other = torch.where(observed, x, torch.rand_like(x) * 2 - 1)
    for first, second in zip(seeded_complete(run, x, observed), seeded_complete(run, other, observed), strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def seeded_complete(run, x, observed):
    run.rng.manual_seed(3)
    return complete(run, x, observed)


def test_metrics(run):
    store = MemoryStore(images_for(run).store.first(200))
    result = inpaint(run, store, "R30", keep=5)
    assert result.hidden_fraction == pytest.approx(19 / 64)
    for kind in (result.generated, result.completed):
        assert kind["z_chain"]["psnr_db"] > kind["inference"]["psnr_db"]
        assert kind["z_chain"]["ssim"] > kind["inference"]["ssim"]
    for stage in STAGES:
        assert result.completed[stage]["psnr_db"] > result.generated[stage]["psnr_db"]  # observed pixels are exact
    observed = make_mask("R30", 200, 8, run.seed)
    x = from_uint8(store.tensor())
    first = complete(run, x, observed)[0]
    assert result.completed["inference"]["psnr_db"] == pytest.approx(float(psnr(x, first[0]).mean()), rel=1e-5)
    assert result.generated["inference"]["psnr_db"] == pytest.approx(float(psnr(x, first[1]).mean()), rel=1e-5)
    error = (x - first[0])[(~observed).expand_as(x)].square().mean()  # of hidden pixels
    expected = float(10 * torch.log10(4 / error))
    assert result.completed["inference"]["psnr_hidden_db"] == pytest.approx(expected, rel=1e-5)
    assert [len(part) for part in (result.original, result.occluded, *result.stages)] == [5] * 5
    assert result.labels() == {
        "inference": "inference",
        "z_chain": "+ z-chain (30 noise-free steps)",
        "x_chain": "+ x-chain (3 steps)",
    }
    columns = (result.original, result.occluded, *result.stages)
    captions = ["image", "masked", *result.labels().values()]
    assert torch.equal(picture(result), side_by_side(*(grid(c, 1) for c in columns), captions=captions, gap=8))


def test_masks_do_not_depend_on_the_batch_size(learned_folder):
    results = []
    for size in (7, 50):
        run = dualmcmc.load(learned_folder, "cpu", overrides=[f"sampling.batch={size}"])
        results.append(inpaint(run, MemoryStore(images_for(run).store.first(20)), "R20"))
    assert torch.equal(results[0].occluded, results[1].occluded)
    assert results[0].completed["inference"] == pytest.approx(results[1].completed["inference"], rel=1e-4)


@pytest.mark.parametrize(("word", "side"), [("M20", 20), ("M30", 30), ("M40", 40)])
def test_central_squares_are_the_papers_at_64_and_scale(word, side):
    mask = make_mask(word, 2, 64)
    assert mask.shape == (2, 1, 64, 64)
    rows, columns = torch.where(~mask[0, 0])
    assert len(rows) == side * side
    assert (rows.min(), rows.max()) == (columns.min(), columns.max()) == ((64 - side) // 2, (64 - side) // 2 + side - 1)
    for size in (8, 28, 32, 256):
        hidden = (~make_mask(word, 1, size)).sum()
        assert int(hidden) == round(side / 64 * size) ** 2


@pytest.mark.parametrize("word", ["R20", "R30", "R40"])
@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_random_blocks_hide_their_fraction(word, size):
    mask = make_mask(word, 5, size)
    hidden = (~mask).sum((1, 2, 3))
    assert hidden.tolist() == [round(int(word[1:]) / 100 * size * size)] * 5
    assert len({m.numpy().tobytes() for m in mask}) == 5  # one per image


def test_random_blocks_are_blocks():
    hidden = ~make_mask("R20", 20, 64)[:, 0]
    inner = hidden[:, 1:-1, 1:-1]
    neighbours = hidden[:, :-2, 1:-1] | hidden[:, 2:, 1:-1]
    assert (neighbours[inner]).double().mean() > 0.95


def test_random_blocks_reach_every_pixel():
    assert (~make_mask("R40", 200, 32)).any(0).all()


def test_central_squares_at_other_sizes():
    hidden = ~make_mask("M20", 1, 28)[0, 0]  # 9 of 28: one pixel more to the right and below
    assert torch.where(hidden)[0].unique().tolist() == list(range(9, 18))
    for size in (8, 28, 32):
        assert int((~make_mask("M1", 1, size)).sum()) == 1
        assert make_mask("M63", 1, size).any()


def test_random_blocks_depend_on_seed_and_index():
    assert torch.equal(make_mask("R30", 6, 32, seed=1), make_mask("R30", 6, 32, seed=1))
    assert not torch.equal(make_mask("R30", 6, 32, seed=1), make_mask("R30", 6, 32, seed=2))
    assert torch.equal(make_mask("R30", 6, 32)[2:], make_mask("R30", 4, 32, first=2))  # for any batch size


def test_mask_from_image(tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = 128  # hidden: 128 and more
    Image.fromarray(pixels).save(tmp_path / "right.png")
    mask = make_mask(str(tmp_path / "right.png"), 3, 8)
    assert mask.shape == (3, 1, 8, 8)
    assert mask[..., :4].all()
    assert not mask[..., 4:].any()


def test_invalid_masks(tmp_path):
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("not an image")
    Image.new("L", (16, 8), 255).save(tmp_path / "wide.png")
    for word, message in [
        ("M64", "1 to 63"),
        ("M0", "1 to 63"),
        ("R0", "1 to 99"),
        ("X20", "M20, M30"),
        (str(tmp_path / "white.png"), "hides everything"),
        (str(tmp_path / "black.png"), "hides nothing"),
        (str(tmp_path / "text.png"), "format"),
        (str(tmp_path), "not an existing file"),
        (str(tmp_path / "wide.png"), "16x8, but must be square"),
    ]:
        with pytest.raises(UserError, match=message):
            make_mask(word, 1, 32)
    for word in MASKS:
        assert torch.equal(make_mask(word, 1, 32), make_mask(word.lower(), 1, 32))
