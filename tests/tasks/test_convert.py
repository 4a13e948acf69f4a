import numpy as np
import pytest
import torch
from PIL import Image

from dualmcmc.config import Data
from dualmcmc.data.images import ImageSpec, decode
from dualmcmc.data.store import MemoryStore
from dualmcmc.tasks.convert import as_images, as_latents, as_store
from dualmcmc.utils.errors import UserError

GREY, RGB = Data(size=8, channels=1), Data(size=8, channels=3)
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
EXPECTED = torch.from_numpy(PIXELS).permute(0, 3, 1, 2).double() / 127.5 - 1


@pytest.mark.parametrize(
    "images",
    [
        PIXELS,
        PIXELS.transpose(0, 3, 1, 2),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
        (PIXELS / 127.5 - 1).astype(np.float32),
        PIXELS / 127.5 - 1,
        EXPECTED.half(),
        list(PIXELS),
        [Image.fromarray(pixels) for pixels in PIXELS],
        [PIXELS[0], Image.fromarray(PIXELS[1]), torch.from_numpy(PIXELS[2:])],
    ],
    ids=["last", "first", "tensor_last", "tensor_first", "float32", "float64", "half", "list", "pil", "mixed"],
)
def test_every_form_gives_the_same_images(images):
    found = as_images(images, RGB)
    assert (found.dtype, found.shape) == (torch.float32, (5, 3, 8, 8))
    assert torch.allclose(found.double(), EXPECTED, atol=1e-3 if getattr(images, "dtype", 0) == torch.float16 else 1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (8, 8, 1), (1, 1, 8, 8), (1, 8, 8, 1)])
def test_greyscale_and_single_images(shape):
    pixels = PIXELS[0, :, :, 0]
    found = as_images(pixels.reshape(shape), GREY)
    assert found.shape == (1, 1, 8, 8)
    assert torch.allclose(found[0, 0].double(), EXPECTED[0, 0], atol=1e-6)


def test_pil_images_are_converted_like_files():
    photo = Image.new("RGBA", (40, 20), (255, 0, 0, 255))
    photo.paste((0, 0, 255, 255), (10, 0, 30, 20))  # what the center crop keeps
    assert torch.equal(as_images(photo, RGB)[0, :, 4, 4], torch.tensor([-1.0, -1.0, 1.0]))
    assert as_images(photo, GREY).shape == (1, 1, 8, 8)
    with pytest.raises(UserError, match="cannot use this image: floating-point pixels of unknown range"):
        as_images(Image.new("F", (8, 8)), GREY)


def test_pil_images_are_treated_like_files(tmp_path):
    """Orientation, and a file that is read only when its pixels are needed."""
    photo = Image.new("RGB", (16, 8), (255, 0, 0))
    photo.paste((0, 0, 255), (8, 0, 16, 8))
    exif = photo.getexif()
    exif[0x0112] = 6  # rotate by a quarter turn
    photo.save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as opened:
        ours = as_images(opened, RGB)
        assert opened.size == (16, 8)  # not modified
    decoded = decode((tmp_path / "a.png").read_bytes(), ImageSpec.from_config(RGB))
    assert torch.equal(ours, as_images(decoded, RGB))
    assert (ours[0, 0, 0] > ours[0, 2, 0]).all()  # red on top
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "b.png")
    content = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(content[: len(content) // 2])
    with Image.open(tmp_path / "b.png") as opened, pytest.raises(UserError, match="cannot use this image"):
        as_images(opened, RGB)


def test_gradients_reach_a_float_tensor():
    x = torch.zeros(2, 1, 8, 8, requires_grad=True)
    assert as_images(x, GREY) is x
    as_images(x[0], GREY).sum().backward()
    assert x.grad.sum() == 64


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 8, 8), r"trained on images of shape 1x8x8 \(channels, height, width\); these .* 2x3x8x8"),
        (torch.zeros(8), "these have shape 8"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.int64), r"uint8 \(0 to 255\) or floats \(-1 to 1\), not int64"),
        (np.zeros((8, 8), bool), "not bool"),
        (
            torch.full((1, 8, 8), 255.0),
            r"must be in \[-1, 1\], but these reach 255: pass pixels from 0 to 255 as uint8",
        ),
        ([], "empty list"),
        (np.array([{}]), "not array of object"),
        ("photo.png", "a PIL image or a list of these, not str"),
    ],
)
def test_wrong_images_are_refused(images, message):
    with pytest.raises(UserError, match=message):
        as_images(images, GREY)


def test_states_of_a_chain_may_leave_the_range():
    for value in (11.7, torch.inf, torch.nan):
        assert as_images(torch.full((1, 1, 8, 8), value), GREY).shape == (1, 1, 8, 8)


def test_stores():
    store = as_store(PIXELS, RGB)
    assert np.array_equal(store.tensor().permute(0, 2, 3, 1).numpy(), PIXELS)
    assert as_store(store, RGB) is store
    assert isinstance(as_store(EXPECTED.float(), RGB), MemoryStore)
    assert np.array_equal(as_store(EXPECTED.float(), RGB).tensor().permute(0, 2, 3, 1).numpy(), PIXELS)


def test_latents():
    z = torch.randn(3, 4)
    for given in (z, z.numpy(), z.double(), z.double().numpy()):
        assert torch.equal(as_latents(given, 4), z)
        assert torch.equal(as_latents(given, 4, 3), z)
    z.requires_grad_()
    assert as_latents(z, 4) is z


@pytest.mark.parametrize(
    ("z", "count", "message"),
    [
        (torch.zeros(2, 3), None, r"latents of shape \(2, 3\) given, expected \(2, 4\)\."),
        (torch.zeros(2, 4), 3, r"expected \(3, 4\)"),
        (torch.zeros(2, 3, 8, 8), None, r"run\.infer\(x\)\.mean are those of images x"),
        (torch.zeros(()), None, r"latents of shape \(\) given"),
        (torch.zeros(2, 4, dtype=torch.int64), None, r"not torch\.int64"),
        (np.zeros((2, 4), dtype=np.int32), None, "not int32"),
        ([[0.0] * 4], None, "not list"),
    ],
)
def test_wrong_latents(z, count, message):
    with pytest.raises(UserError, match=message):
        as_latents(z, 4, count)
