"""scikit-learn's bundled handwritten digits: 1,797 real 8x8 images, no download.

The test part of the UCI "Optical Recognition of Handwritten Digits" set (Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualmcmc.data.source import Arrays, Source


def read(path: Path) -> dict[str, Source]:
    """Bundled: `path` is not looked at."""
    return {"train": Arrays("digits", digits, 1797)}


def digits() -> np.ndarray:
    """(1797, 8, 8, 1) bytes; the set's 17 grey levels spread over 0..255."""
    from sklearn.datasets import load_digits

    levels = load_digits().images  # 0..16
    return (levels * (255 / 16)).round().astype(np.uint8)[..., None]
