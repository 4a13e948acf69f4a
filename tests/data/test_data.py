import io
import os
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc import data
from dualmcmc.config import Data
from dualmcmc.data.digits import digits
from dualmcmc.data.files import read_images
from dualmcmc.errors import UserError


def pattern(seed, size=32, mode="RGB"):
    channels = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(), mode)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for index in range(5):
        where = tmp_path / "in" / ("sub" if index % 2 else ".")
        pattern(index).save(where / f"{index}.png")
    (tmp_path / "in" / "notes.txt").write_text("not an image")
    return tmp_path / "in"


def test_digits_are_the_real_ones():
    images = digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert (images.min(), images.max()) == (0, 255)
    from sklearn.datasets import load_digits

    assert (images[:, 0].double() * 16 / 255 - torch.from_numpy(load_digits().images)).abs().max() < 0.04


def test_the_split_is_fixed_and_whole():
    cfg = Data(source="digits", size=8, channels=1, holdout=0.2)
    first, second = data.load(cfg), data.load(cfg)
    assert torch.equal(first.train, second.train)
    assert (len(first.train), len(first.test)) == (1438, 359)
    rows = torch.cat([first.train, first.test]).flatten(1).sum(1).sort().values
    assert torch.equal(rows, digits().flatten(1).sum(1).sort().values)


def test_a_folder_a_zip_and_an_npz_agree(folder, tmp_path):
    images = read_images(folder, 32, 3)
    names = sorted(path for path in folder.rglob("*.png"))
    assert torch.equal(images, torch.stack([torch.from_numpy(np.array(Image.open(n))).permute(2, 0, 1) for n in names]))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in names:
            archive.write(path, path.relative_to(folder).as_posix())
        archive.writestr("__MACOSX/._0.png", b"junk")
    assert torch.equal(read_images(tmp_path / "a.zip", 32, 3), images)
    for layout in ((0, 2, 3, 1), (0, 1, 2, 3)):
        np.savez(tmp_path / "a.npz", images=images.permute(*layout).numpy())
        assert torch.equal(read_images(tmp_path / "a.npz", 32, 3), images)


def test_other_sizes_and_modes_are_converted(tmp_path):
    pattern(0, 64, "RGBA").crop((0, 0, 64, 48)).save(tmp_path / "a.png")
    Image.new("L", (100, 40), 77).save(tmp_path / "b.jpg")
    images = read_images(tmp_path, 32, 3)
    assert images.shape == (2, 3, 32, 32)
    assert (images[1].float() - 77).abs().max() <= 2
    assert read_images(tmp_path, 8, 1).shape == (2, 1, 8, 8)
    np.savez(tmp_path / "grey.npz", np.zeros((3, 28, 28), np.uint8))
    assert read_images(tmp_path / "grey.npz", 32, 1).shape == (3, 1, 32, 32)


def test_sixteen_bits_a_pixel_keep_their_brightness(tmp_path):
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    image = read_images(tmp_path, 8, 1)[0, 0].double()
    assert (image - torch.from_numpy(levels / 257.0)).abs().max() <= 1


def test_shadows_of_macos_are_passed_over(tmp_path):
    pattern(0).save(tmp_path / "a.png")
    (tmp_path / "._a.png").write_bytes(b"no image")
    assert len(read_images(tmp_path, 32, 3)) == 1


def test_odd_shapes_in_an_npz(tmp_path):
    for shape in ((2, 1, 16, 3), (2, 16, 1, 3), (2, 20, 10, 3)):
        np.savez(tmp_path / "a.npz", np.zeros(shape, np.uint8))
        assert read_images(tmp_path / "a.npz", 8, 3).shape == (2, 3, 8, 8)


def test_one_image_file(tmp_path):
    pattern(0).save(tmp_path / "a.png")
    assert read_images(tmp_path / "a.png", 32, 3).shape == (1, 3, 32, 32)


def evil_npz(path):
    array = np.empty(1, object)
    array[0] = print
    np.savez(path, array)


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("absent", lambda p: None, "there is nothing at"),
        ("empty", lambda p: p.mkdir(), "holds no images"),
        ("text.txt", lambda p: p.write_text("hello"), "is not a folder"),
        ("zero.png", lambda p: p.write_bytes(b""), "cannot read the image"),
        ("cut.jpg", lambda p: p.write_bytes(jpeg()[:-400]), "cannot read the image"),
        ("broken.npz", lambda p: p.write_bytes(b"PK nonsense"), "is not an npz file"),
        ("array.npz", lambda p: npy(p), "is not an npz file"),
        ("damaged.npz", lambda p: damaged(p, "npz"), "cannot read"),
        ("damaged.zip", lambda p: damaged(p, "zip"), "cannot read"),
        ("cut.zip", lambda p: damaged(p, "directory"), "cannot read"),
        ("pipe", lambda p: os.mkfifo(p), "is not a folder"),
        ("pickled.npz", evil_npz, "cannot read"),
        ("floats.npz", lambda p: np.savez(p, np.zeros((2, 8, 8, 3))), "must be uint8"),
        ("flat.npz", lambda p: np.savez(p, np.zeros((2, 8), np.uint8)), "has shape"),
        ("grey.npz", lambda p: np.savez(p, np.zeros((2, 8, 8), np.uint8)), "data.channels=3"),
        ("none.npz", lambda p: np.savez(p), "holds no array"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, name, make, words):
    make(tmp_path / name)
    with pytest.raises(UserError) as error:
        read_images(tmp_path / name, 32, 3)
    assert words in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def npy(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros((2, 8, 8), np.uint8))


def damaged(path, kind):
    """A compressed archive with a hurt content, or directory."""
    if kind == "npz":
        np.savez_compressed(path, np.zeros((50, 32, 32, 3), np.uint8))
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.png", np.random.default_rng(0).bytes(2_000))
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02") if kind == "directory" else 60
    content[at : at + 15] = b"\xff" * 15
    path.write_bytes(bytes(content))


def jpeg():
    buffer = io.BytesIO()
    pattern(0, 64).save(buffer, "JPEG")
    return buffer.getvalue()


def test_what_a_config_asks_for(folder):
    cfg = Data(source="files", path=str(folder), size=32, channels=3)
    assert data.load(cfg).test is None
    both = data.load(Data(source="files", path=str(folder), test_path=str(folder / "sub"), size=32, channels=3))
    assert (len(both.train), len(both.test)) == (5, 2)
    for bad, words in [
        (Data(source="files"), r"data\.path"),
        (Data(source="digits", size=32), "8x8 grey"),
        (Data(source="files", path=str(folder), holdout=0.01), "leaves nothing"),
    ]:
        with pytest.raises(UserError, match=words):
            data.load(bad)
