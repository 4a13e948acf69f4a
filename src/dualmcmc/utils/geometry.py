"""Image sizes that the convolutional networks support."""

from __future__ import annotations

from dualmcmc.utils.errors import UserError

MAX_SIZE = 1024  # pixels


def downsampling_stages(size: int) -> tuple[int, int]:
    """(base, n) with size = base * 2^n and base in 4..7: the smallest feature map and the number of halvings.

    8 -> (4, 1), 28 -> (7, 2), 32 -> (4, 3), 64 -> (4, 4), 256 -> (4, 6).
    """
    base, count = size, 0
    while base > 7 and base % 2 == 0:
        base, count = base // 2, count + 1
    if not 4 <= base <= 7 or count == 0:
        raise UserError(
            f"the networks do not support data.size={size}: use 4, 5, 6 or 7 times a power of two, such as 8, 28, 32, "
            "64 or 256."
        )
    return base, count


def is_supported_size(size: int) -> bool:
    """Whether the networks support images of this side."""
    try:
        downsampling_stages(size)
    except UserError:
        return False
    return size <= MAX_SIZE
