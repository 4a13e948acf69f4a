"""The energy E(x) = -f_alpha(x) of the EBM pi(x) ~ exp(f_alpha(x)), Eq. 1.

With `gain`, every activation and the output have a gain, which `signal.normalize_signal` sets before training.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from dualmcmc.nets.blocks import Activation, DownBlock, Gain, resnet_widths
from dualmcmc.utils.geometry import downsampling_stages


class SimpleEnergy(nn.Module):
    """Plain convolutions: conv3; per halving a stride-2 conv4 and `depth` - 1 conv3; one hidden linear layer.

    2 M parameters at 32x32 with width 64 and depth 1, or width 48 and depth 2.
    """

    def __init__(self, size: int, channels: int, width: int, depth: int = 1, gain: bool = False) -> None:
        super().__init__()
        base, count = downsampling_stages(size)
        widths = [min(width << level, 4 * width) for level in range(count + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), Activation(0.2, gain)]
        for in_channels, out_channels in pairwise(widths):
            layers += [nn.Conv2d(in_channels, out_channels, 4, stride=2, padding=1), Activation(0.2, gain)]
            for _ in range(depth - 1):
                layers += [nn.Conv2d(out_channels, out_channels, 3, padding=1), Activation(0.2, gain)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(widths[-1] * base * base, width)
        self.hidden_activation = Activation(0.2, gain)
        self.out = nn.Linear(width, 1, bias=False)
        self.out_gain = Gain(gain)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) images -> (B,) energies."""
        h = self.features(x).to(x.dtype)  # convolutions may run in bfloat16
        return self.out_gain(self.out(self.hidden_activation(self.hidden(h))).flatten())


class ResnetEnergy(nn.Module):
    """Residual blocks of width nef, spatial mean, linear to 1, no biases. 16 M parameters at 32x32 with nef 512."""

    def __init__(self, size: int, channels: int, nef: int, gain: bool = False) -> None:
        super().__init__()
        widths = resnet_widths(size, nef)[::-1]
        if size <= 32:  # two blocks that halve the map, two that keep its size
            blocks = [DownBlock(channels, nef, down=True, first=True, gain=gain), DownBlock(nef, nef, True, gain=gain)]
            blocks += [DownBlock(nef, nef, down=False, gain=gain) for _ in range(2)]
        else:  # halve down to 2x2
            blocks = [DownBlock(channels, widths[0], down=True, first=True, gain=gain)]
            blocks += [DownBlock(a, b, down=True, gain=gain) for a, b in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.activation = Activation(gain=gain)
        self.out = nn.Linear(widths[-1], 1, bias=False)
        self.out_gain = Gain(gain)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) images -> (B,) energies."""
        return self.out_gain(self.out(self.activation(self.blocks(x)).mean(dim=(2, 3), dtype=x.dtype)).flatten())
