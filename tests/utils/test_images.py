import numpy as np
import torch
from PIL import Image

from dualmcmc.utils.images import from_uint8, grid, save_png, side_by_side, to_uint8


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


def test_small_greyscale_images_are_enlarged(tmp_path):
    picture = grid(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), columns=2)
    assert picture.shape[1] > 2 * 40
    save_png(picture, tmp_path / "grey.png")
    assert Image.open(tmp_path / "grey.png").mode == "L"
