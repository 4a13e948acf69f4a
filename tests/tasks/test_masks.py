import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc.errors import UserError
from dualmcmc.tasks.masks import NAMES, observed


@pytest.mark.parametrize(("word", "side"), [("M20", 20), ("M30", 30), ("M40", 40)])
def test_centre_blocks_are_the_papers_at_64_and_scale(word, side):
    mask = observed(word, 2, 64)
    assert mask.shape == (2, 1, 64, 64)
    rows, columns = torch.where(~mask[0, 0])
    assert len(rows) == side * side
    assert (rows.min(), rows.max()) == (columns.min(), columns.max()) == ((64 - side) // 2, (64 - side) // 2 + side - 1)
    for size in (8, 28, 32, 256):
        hidden = (~observed(word, 1, size)).sum()
        assert int(hidden) == round(side / 64 * size) ** 2


@pytest.mark.parametrize("word", ["R20", "R30", "R40"])
@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_random_blocks_hide_their_share(word, size):
    mask = observed(word, 5, size)
    hidden = (~mask).sum((1, 2, 3))
    assert hidden.tolist() == [round(int(word[1:]) / 100 * size * size)] * 5
    assert len({m.numpy().tobytes() for m in mask}) == 5  # each image has its own


def test_random_blocks_are_blocks():
    hidden = ~observed("R20", 20, 64)[:, 0]
    inner = hidden[:, 1:-1, 1:-1]
    neighbours = hidden[:, :-2, 1:-1] | hidden[:, 2:, 1:-1]
    assert (neighbours[inner]).double().mean() > 0.95


def test_random_blocks_reach_every_pixel():
    assert (~observed("R40", 200, 32)).any(0).all()


def test_centre_blocks_of_an_odd_rest_and_at_the_extremes():
    hidden = ~observed("M20", 1, 28)[0, 0]  # 9 of 28: one more to the right and below
    assert torch.where(hidden)[0].unique().tolist() == list(range(9, 18))
    for size in (8, 28, 32):
        assert int((~observed("M1", 1, size)).sum()) == 1
        assert observed("M63", 1, size).any()


def test_random_blocks_follow_the_seed_and_the_image():
    assert torch.equal(observed("R30", 6, 32, seed=1), observed("R30", 6, 32, seed=1))
    assert not torch.equal(observed("R30", 6, 32, seed=1), observed("R30", 6, 32, seed=2))
    assert torch.equal(observed("R30", 6, 32)[2:], observed("R30", 4, 32, first=2))  # whatever the batch


def test_a_picture_of_ones_own(tmp_path):
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:, 16:] = 128  # this and more hides
    Image.fromarray(pixels).save(tmp_path / "right.png")
    mask = observed(str(tmp_path / "right.png"), 3, 8)
    assert mask.shape == (3, 1, 8, 8)
    assert mask[..., :4].all()
    assert not mask[..., 4:].any()


def test_bad_masks(tmp_path):
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("no picture")
    Image.new("L", (16, 8), 255).save(tmp_path / "wide.png")
    for word, message in [
        ("M64", "M1 to M63"),
        ("M0", "M1 to M63"),
        ("R0", "between 1 and 99"),
        ("X20", "M20, M30"),
        (str(tmp_path / "white.png"), "hides everything"),
        (str(tmp_path / "black.png"), "hides nothing"),
        (str(tmp_path / "text.png"), "no known image format"),
        (str(tmp_path), "no such file"),
        (str(tmp_path / "wide.png"), "16x8, and must be square"),
    ]:
        with pytest.raises(UserError, match=message):
            observed(word, 1, 32)
    for word in NAMES:
        assert torch.equal(observed(word, 1, 32), observed(word.lower(), 1, 32))
