"""One image: decoded, cropped, resized and brought to one colour mode, as bytes.

What becomes of each kind of file, good and bad, is listed in docs/data.md and tested.
"""

from __future__ import annotations

import io
import threading
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dualmcmc.config import CROPS, Crop, Data, Resize
from dualmcmc.errors import first_line

MOST_PIXELS = 80_000_000  # of one image: more is taken for a decompression bomb
MOST_SCANS = 200  # of one JPEG, which has ten: each takes the time of a whole image, and a few bytes
MANY_PIXELS = 16_000_000  # such images are decoded one at a time, so that memory does not grow with the cores
# Not all that Pillow knows: it has PostScript, which is a program, run by Ghostscript.
FORMATS = ("PNG", "JPEG", "JPEG2000", "WEBP", "AVIF", "BMP", "GIF", "TGA", "TIFF", "PPM")
RESIZES = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
}

# Pillow remarks on odd files that it can read well enough. For good, since catch_warnings is not for threads.
warnings.filterwarnings("ignore", module=r"PIL\.")

ALIGNED = (178, 218)  # width and height of CelebA's aligned images


_one_at_a_time = threading.Lock()


class BadImage(Exception):
    """An image that cannot be used, and why."""


@dataclass(frozen=True)
class Fit:
    """What images are brought to. None leaves the size, or the colour mode, as it is."""

    size: int | None = None
    channels: int | None = None
    crop: Crop = "center"
    resize: Resize = "lanczos"
    converted: set[str] = field(default_factory=set, compare=False, repr=False)  # what had to be, filled on the way

    @classmethod
    def of(cls, cfg: Data) -> Fit:
        """What a config asks for."""
        return cls(cfg.size, cfg.channels, cfg.crop, cfg.resize)


def decode(content: bytes, fit: Fit) -> np.ndarray:
    """(H, W, C) bytes of an image file's content; C is 1 or 3."""
    if not content:
        raise BadImage("the file is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:
            raise BadImage(f"{image.width}x{image.height} pixels, more than {MOST_PIXELS // 10**6} million")
        if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MOST_SCANS:
            raise BadImage(f"a JPEG of more than {MOST_SCANS} scans")
        with _one_at_a_time if image.width * image.height > MANY_PIXELS else nullcontext():
            ImageOps.exif_transpose(image, in_place=True)
            return _fitted(_plain(image), fit)
    except UnidentifiedImageError:
        raise BadImage("it is in no known image format") from None
    except Image.DecompressionBombError:
        raise BadImage(f"more than {MOST_PIXELS // 10**6} million pixels") from None
    except BadImage:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        raise BadImage(first_line(error)) from None


def fit_pixels(pixels: np.ndarray, fit: Fit) -> np.ndarray:
    """(H, W, C) bytes brought to `fit`."""
    height, width, channels = pixels.shape
    same_mode = fit.channels in (None, channels)
    if fit.size is None and same_mode:
        return pixels
    whole = (0, 0, width, height)
    if width == height == fit.size and same_mode and crop_box(width, height, fit.crop) == whole:
        return pixels
    return _fitted(Image.fromarray(pixels[..., 0] if channels == 1 else pixels), fit)


def _plain(image: Image.Image) -> Image.Image:
    """Grey or RGB, eight bits a channel; what is transparent lies on white."""
    if image.mode == "I" and image.format != "PNG":
        raise BadImage("its pixels are 32-bit numbers, whose range is not known")
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would cut off at 255
        return Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.mode == "F":
        raise BadImage("its pixels are floating-point numbers, whose range is not known")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
        grey = layer.getchannel("R") == layer.getchannel("G") == layer.getchannel("B")
        return image.convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _fitted(image: Image.Image, fit: Fit) -> np.ndarray:
    mode = {None: image.mode, 1: "L", 3: "RGB"}[fit.channels]
    if image.mode != mode or (fit.size is not None and image.size != (fit.size, fit.size)):
        fit.converted.add(f"{image.width}x{image.height} {'grey' if image.mode == 'L' else 'RGB'}")
    if fit.channels is not None:
        image = image.convert("L" if fit.channels == 1 else "RGB")
    if fit.size is not None:
        box = crop_box(image.width, image.height, fit.crop)
        if box != (0, 0, *image.size):
            image = image.crop(box)
        if image.size != (fit.size, fit.size):
            image = image.resize((fit.size, fit.size), RESIZES[fit.resize])
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def crop_box(width: int, height: int, crop: Crop) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of what is kept.

    CelebA's crops are in pixels of its aligned 178x218 images and scale with copies of another size.
    """
    if crop == "none":
        return 0, 0, width, height
    if crop == "center":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return left, top, left + side, top + side
    scale = width / ALIGNED[0]
    if abs(height - ALIGNED[1] * scale) > 1:
        raise BadImage(
            f"crop={crop} is for CelebA's aligned images of {ALIGNED[0]}x{ALIGNED[1]} or that shape, "
            f"and it has {width}x{height}"
        )
    wanted, center_x, center_y = CROPS[crop]
    side = round(wanted * scale)
    left, top = int(center_x * scale - side / 2), int(center_y * scale - side / 2)
    return left, top, left + side, top + side


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) of grey or colour bytes."""
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))
