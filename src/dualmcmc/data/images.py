"""Decode, crop, resize and convert single images to uint8.

docs/guide/data.md lists what happens to each kind of file, valid or not.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dualmcmc.config import Crop, Data, Resize
from dualmcmc.utils.errors import first_line

MAX_PIXELS = 80_000_000  # per image: more is taken for a decompression bomb
MAX_SCANS = 200  # per JPEG, ten are usual: each costs a few bytes and as much time as a whole image
SERIAL_PIXELS = 16_000_000  # larger images are decoded one at a time, so that memory does not grow with the cores
# Not all formats of Pillow: PostScript is a program, which Ghostscript would run.
FORMATS = ("PNG", "JPEG", "JPEG2000", "WEBP", "AVIF", "BMP", "GIF", "TGA", "TIFF", "PPM")
FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
}
CELEBA_SIZE = (178, 218)  # width and height of the aligned images
CELEBA_CROPS = {  # side of the square, and its center (x, y)
    "celeba108": (108, 89, 109),  # DCGAN
    "celeba128": (128, 89, 121),  # progressive GANs
    "celeba140": (140, 89, 109),  # score-based and energy-based models
    "celeba148": (148, 89, 109),  # VAEs and WAEs
    "celeba178": (178, 89, 109),  # the full width
}

# Pillow warns about unusual files that it reads correctly. Global, since catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")

_serial = threading.Lock()


class UnreadableImage(Exception):
    """An image that cannot be used, and the reason."""


@dataclass(frozen=True)
class ImageSpec:
    """Target size and colour mode of images. None keeps the image's own."""

    size: int | None = None
    channels: int | None = None
    crop: Crop = "center"
    resize: Resize = "lanczos"
    converted: set[str] = field(default_factory=set, compare=False, repr=False)  # sizes and modes that were converted

    @classmethod
    def from_config(cls, cfg: Data) -> ImageSpec:
        """The spec of a config."""
        return cls(cfg.size, cfg.channels, cfg.crop, cfg.resize)


def decode(content: bytes, spec: ImageSpec) -> np.ndarray:
    """(H, W, C) uint8 pixels of an encoded image; C is 1 or 3."""
    if not content:
        raise UnreadableImage("the file is empty")
    with _unreadable():
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MAX_SCANS:
            raise UnreadableImage(f"a JPEG with more than {MAX_SCANS} scans")
    return from_pil(image, spec)


def from_pil(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    """(H, W, C) uint8 pixels of an opened image."""
    with _unreadable():
        if image.width * image.height > MAX_PIXELS:
            raise UnreadableImage(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS // 10**6} million")
        with _serial if image.width * image.height > SERIAL_PIXELS else nullcontext():
            return _apply(_to_8_bit(ImageOps.exif_transpose(image)), spec)


@contextmanager
def _unreadable() -> Iterator[None]:
    """Turn whatever Pillow raises into `UnreadableImage`."""
    try:
        yield
    except UnidentifiedImageError:
        raise UnreadableImage("unknown image format") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(f"more than {MAX_PIXELS // 10**6} million pixels") from None
    except UnreadableImage:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise UnreadableImage(first_line(error)) from None


def convert(pixels: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """(H, W, C) uint8 pixels converted to `spec`."""
    height, width, channels = pixels.shape
    same_mode = spec.channels in (None, channels)
    if spec.size is None and same_mode:
        return pixels
    full = (0, 0, width, height)
    if width == height == spec.size and same_mode and crop_box(width, height, spec.crop) == full:
        return pixels
    return _apply(Image.fromarray(pixels[..., 0] if channels == 1 else pixels), spec)


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Greyscale or RGB, 8 bits per channel; transparent pixels become white."""
    if image.mode == "I" and image.format != "PNG":
        raise UnreadableImage("32-bit pixels of unknown range")
    if image.mode.startswith("I"):  # 16-bit greyscale, which convert() would clip at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.mode == "F":
        raise UnreadableImage("floating-point pixels of unknown range")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        grey = layer.getchannel("R") == layer.getchannel("G") == layer.getchannel("B")
        return image.convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _apply(image: Image.Image, spec: ImageSpec) -> np.ndarray:
    mode = {None: image.mode, 1: "L", 3: "RGB"}[spec.channels]
    if image.mode != mode or (spec.size is not None and image.size != (spec.size, spec.size)):
        spec.converted.add(f"{image.width}x{image.height} {'greyscale' if image.mode == 'L' else 'RGB'}")
    if image.mode != mode:
        image = image.convert(mode)
    if spec.size is not None:
        box = crop_box(image.width, image.height, spec.crop)
        if box != (0, 0, *image.size):
            image = image.crop(box)
        if image.size != (spec.size, spec.size):
            image = image.resize((spec.size, spec.size), FILTERS[spec.resize])
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def crop_box(width: int, height: int, crop: Crop) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of the part that is kept.

    CelebA's crops are given in pixels of the aligned 178x218 images, and scaled for copies of another size.
    """
    if crop == "none":
        return 0, 0, width, height
    if crop == "center":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side
    scale = width / CELEBA_SIZE[0]
    if abs(height - CELEBA_SIZE[1] * scale) > 1:
        raise UnreadableImage(
            f"crop={crop} is for CelebA's aligned images ({CELEBA_SIZE[0]}x{CELEBA_SIZE[1]}, or scaled), "
            f"this is {width}x{height}"
        )
    crop_side, center_x, center_y = CELEBA_CROPS[crop]
    side = round(crop_side * scale)
    left, top = int(center_x * scale - side / 2), int(center_y * scale - side / 2)
    return left, top, left + side, top + side


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) view of greyscale or RGB pixels."""
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))
