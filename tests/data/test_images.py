"""Every kind of image file that docs/guide/data.md lists, valid or not."""

import io

import numpy as np
import pytest
from PIL import Image

from dualmcmc.data.images import ImageSpec, UnreadableImage, convert, crop_box, decode
from tests.data.makers import encoded, pixels

RGB, GREY = ImageSpec(16, 3), ImageSpec(16, 1)


def saved(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_image_of_the_right_size_is_unchanged():
    image = pixels(1, 16)[0]
    assert np.array_equal(decode(encoded(image), RGB), image)
    assert np.array_equal(convert(image, RGB), image)
    grey = pixels(1, 16, 1)[0]
    assert np.array_equal(decode(encoded(grey), GREY), grey)


def test_empty_spec_changes_nothing():
    for channels in (1, 3):
        image = pixels(1, (9, 21), channels)[0]
        assert np.array_equal(decode(encoded(image), ImageSpec()), image)


def test_16_bit_greyscale():
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    image = decode(saved(Image.fromarray(levels)), GREY)[..., 0]
    assert np.array_equal(image, np.round(levels / 257))


def test_palette():
    image = Image.new("P", (16, 16), 3)
    image.putpalette([0, 0, 0, 1, 1, 1, 2, 2, 2, 200, 100, 50] + [0] * 756)
    assert (decode(saved(image), RGB) == (200, 100, 50)).all()


def test_transparency_becomes_white():
    image = Image.new("RGBA", (16, 16), (10, 20, 30, 255))
    image.paste((0, 0, 0, 0), (0, 0, 16, 8))
    got = decode(saved(image), RGB)
    assert (got[:8] == 255).all()
    assert (got[8:] == (10, 20, 30)).all()
    palette = Image.new("P", (16, 16), 0)
    assert (decode(saved(palette, transparency=0), RGB) == 255).all()
    assert (decode(saved(Image.new("LA", (16, 16), (90, 0))), GREY) == 255).all()


def test_cmyk():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(decode(saved(image, "JPEG", quality=95), RGB).astype(int) - (255, 0, 0)).max() <= 6


def test_greyscale_to_rgb_and_back():
    grey = pixels(1, 16, 1)[0]
    assert np.array_equal(decode(encoded(grey), RGB), np.repeat(grey, 3, 2))
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 255
    assert (decode(encoded(red), GREY) == 76).all()


def test_exif_orientation():
    image = Image.new("RGB", (16, 16), "black")
    image.paste("white", (0, 0, 16, 4))  # the top, but the EXIF tag says upside down
    exif = Image.Exif()
    exif[0x0112] = 3
    got = decode(saved(image, "JPEG", exif=exif, quality=95), RGB)
    assert got[-3:].mean() > 200
    assert got[:8].mean() < 50


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    content = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode(content, RGB) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"no image at all", "unknown image format"),
        (encoded(pixels(1, 64)[0], "JPEG")[:-900], "truncated"),
        (encoded(pixels(1, 64)[0])[:-900], ""),
        (encoded(pixels(1, 64)[0], "JPEG")[:100], ""),
        (saved(Image.new("1", (10_000, 10_000))), "10000x10000"),
        (saved(Image.new("1", (20_000, 12_000))), "million"),
        (saved(Image.new("F", (16, 16)), "TIFF"), "floating-point"),
        (saved(Image.new("I", (16, 16), 200_000), "TIFF"), "32-bit"),
    ],
)
def test_unreadable_images_have_a_reason(content, message):
    with pytest.raises(UnreadableImage) as error:
        decode(content, RGB)
    assert message in str(error.value)
    assert str(error.value)


def test_center_crop():
    image = pixels(1, (16, 30))[0]
    assert np.array_equal(convert(image, RGB), image[:, 7:23])
    assert crop_box(30, 17, "center") == (6, 0, 23, 17)


def test_no_crop():
    image = np.zeros((16, 32, 3), np.uint8)
    image[:, 16:] = 200
    got = convert(image, ImageSpec(16, 3, "none", "box"))
    assert (got[:, :8] == 0).all()
    assert (got[:, 8:] == 200).all()


@pytest.mark.parametrize(
    ("crop", "box"),
    [  # left, top, right, bottom in 178x218, as in the repositories that introduced the crops
        ("celeba108", (35, 55, 143, 163)),
        ("celeba128", (25, 57, 153, 185)),
        ("celeba140", (19, 39, 159, 179)),
        ("celeba148", (15, 35, 163, 183)),
        ("celeba178", (0, 20, 178, 198)),
    ],
)
def test_celeba_crop_boxes(crop, box):
    assert crop_box(178, 218, crop) == box
    half = crop_box(89, 109, crop)
    if crop == "celeba140":
        assert half == (9, 19, 79, 89)  # 70 pixels around the center
    assert max(abs(2 * mine - theirs) for mine, theirs in zip(half, box, strict=True)) <= 2
    assert half[2] - half[0] == half[3] - half[1] == (box[2] - box[0]) // 2


def test_celeba_crop_is_resized():
    image = pixels(1, (218, 178))[0]
    expected = Image.fromarray(image[39:179, 19:159]).resize((64, 64), Image.Resampling.LANCZOS)
    assert np.array_equal(convert(image, ImageSpec(64, 3, "celeba140")), np.asarray(expected))
    with pytest.raises(UnreadableImage, match="64x64"):
        convert(pixels(1, 64)[0], ImageSpec(32, 3, "celeba140"))


@pytest.mark.parametrize("resize", ["lanczos", "bilinear", "bicubic", "box"])
def test_resize_filters(resize):
    image = pixels(1, 32)[0]
    expected = Image.fromarray(image).resize((16, 16), getattr(Image.Resampling, resize.upper()))
    assert np.array_equal(convert(image, ImageSpec(16, 3, resize=resize)), np.asarray(expected))
