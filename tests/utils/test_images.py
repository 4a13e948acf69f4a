import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc.utils import images as module
from dualmcmc.utils.images import (
    before_and_after,
    from_uint8,
    grid,
    save_png,
    side_by_side,
    stacked,
    strip,
    to_uint8,
)


def random_images(count, channels, size):
    return torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8)


def test_uint8_round_trip_and_clamping():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(from_uint8(every)), every)
    assert to_uint8(torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])).tolist() == [0, 0, 128, 255, 255]


def test_grid(tmp_path):
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 64, 64) * 10
    picture = grid(images, columns=3)
    assert picture.shape == (3, 2 * 64 + 1, 3 * 64 + 2)
    for index in range(5):
        row, column = divmod(index, 3)
        assert (picture[:, row * 65 : row * 65 + 64, column * 65 : column * 65 + 64] == index * 10).all()
    assert (picture[:, 65:, 130:] == 255).all()
    both = side_by_side(picture, picture)
    assert both.shape[2] == 2 * picture.shape[2] + 24
    save_png(both, tmp_path / "a.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), both.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("size", "scale"), [(8, 8), (28, 3), (40, 2), (64, 1), (256, 1)])
def test_images_are_enlarged_by_an_integer(tmp_path, size, scale):
    images = random_images(4, 1, size)
    picture = grid(images, columns=2)
    side = size * scale
    assert side >= 64
    assert np.array_equal(picture[0, -side:, -side:], np.kron(images[3, 0], np.ones((scale, scale), np.uint8)))
    save_png(picture, tmp_path / "grey.png")
    assert Image.open(tmp_path / "grey.png").mode == "L"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 28, 40, 64, 256])
def test_captions_are_above_exact_pixels(size, channels):
    """Each caption has ink, none in the gaps between columns, and the images below are as without captions."""
    frames = [random_images(3, channels, size) for _ in range(12)]
    captions = [*(f"step {10**k}" for k in range(9)), "+ z-chain (10 noise-free steps)", "x" * 200, "image"]
    picture = strip(frames, 2, captions)
    bare = grid(torch.stack([frame[:2] for frame in frames], 1).flatten(0, 1), 12)
    height = picture.shape[1] - bare.shape[1]
    assert torch.equal(picture[:, height:], bare)
    text = picture[:, :height]
    pitch = (picture.shape[2] - grid(frames[0][:1], 1).shape[2]) // 11
    for column in range(12):
        assert (text[:, :, column * pitch : (column + 1) * pitch] < 128).any()
        assert (text[:, :, (column + 1) * pitch - 1 : (column + 1) * pitch] == 255).all()
    assert (text[:, -1] == 255).all()


@pytest.mark.parametrize("width", [64, 130, 519])
@pytest.mark.parametrize(
    "text", ["generator", "after 100000 steps", "images of " + "W" * 100, "+ z-chain (10 steps)", ""]
)
def test_captions_are_wrapped_not_cut(text, width):
    font = module._font(module.MIN_TEXT)
    lines = module._wrap(text, font, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(font.getlength, lines)) <= width
    if font.getlength(text) <= width:
        assert lines == [text]


def test_grids_are_aligned_below_captions_of_several_lines():
    picture = strip([torch.zeros(1, 1, 64, 64, dtype=torch.uint8)] * 2, 1, ["image", "a caption of several lines"])
    top = picture.shape[1] - 64
    assert (picture[0, top:, :64] == 0).all()
    assert (picture[0, top:, -64:] == 0).all()
    ink = [(picture[0, :top, columns] < 128).any(1).nonzero() for columns in (slice(0, 64), slice(65, 129))]
    assert ink[0].min() > ink[1].min() + 10  # one line, next to the last of several
    assert ink[0].max() <= ink[1].max() + 3


def test_text_grows_with_the_picture():
    def line_height(count):
        images = random_images(count, 3, 64)
        side = round(count**0.5)
        return before_and_after(images, images, side, "30 steps").shape[1] - grid(images, side).shape[1]

    assert line_height(4) < line_height(400)


def test_stacked_pictures_with_captions():
    grey, colour = torch.zeros(1, 70, 300, dtype=torch.uint8), torch.full((3, 50, 200), 9, dtype=torch.uint8)
    picture = stacked(grey, colour, captions=["prior draws", "held-out images"])
    assert picture.shape[::2] == (3, 300)
    assert (picture[:, -50:, 50:250] == 9).all()  # centred
    between = (picture == 0).all(0)[:, :300].all(1).nonzero()
    assert len(between) == 70
    assert (picture[:, : int(between.min())] < 128).any()
    with pytest.raises(ValueError, match="zip"):
        stacked(grey, colour, captions=["prior draws"])


def test_samples_of_one_kind_have_a_caption():
    images = torch.randint(0, 256, (4, 1, 64, 64), dtype=torch.uint8)
    generated, revised = before_and_after(images, None, 2, "3 steps"), before_and_after(None, images, 2, "3 steps")
    both = before_and_after(images, images, 2, "3 steps")
    assert generated.shape[1] > grid(images, 2).shape[1]  # with a line of text
    assert not torch.equal(generated, revised)
    assert both.shape[2] > generated.shape[2] + revised.shape[2]
