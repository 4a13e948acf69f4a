"""scikit-learn's bundled handwritten digits: 1,797 real 8x8 images, no download.

The test part of the UCI "Optical Recognition of Handwritten Digits" set (Alpaydin and Kaynak, 1998).
"""

from __future__ import annotations

import torch
from torch import Tensor


def digits() -> Tensor:
    """(1797, 1, 8, 8) bytes; the set's 17 grey levels spread over 0..255."""
    from sklearn.datasets import load_digits

    levels = torch.from_numpy(load_digits().images)  # 0..16
    return (levels * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
