"""What a solved head reads of a feature map: statistics of the map and of every layer behind it.

    maps (B, c, h, w) -> layer 1 -> maps -> layer 2 -> maps -> ...
          '- mean and standard deviation over positions, of each channel of each of them -' -> readings (B, D)

A last layer knows what it was trained for; the layers before it know more about classes that came later.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Readout(nn.Module):
    """maps (B, c, h, w) -> readings (B, D). `tail` is shared with the caller, not copied."""

    def __init__(self, tail: nn.Module):
        super().__init__()
        self.layers = tail if isinstance(tail, nn.Sequential) else nn.Sequential(tail)

    def forward(self, maps: Tensor) -> Tensor:
        parts = [statistics(maps)]
        for layer in self.layers:
            maps = layer(maps)
            if maps.shape[2:].numel() > 1 or len(self.layers) == 1:  # a pooled map is the mean of the layer before
                parts.append(statistics(maps))
        return torch.cat(parts, dim=1)


def statistics(maps: Tensor) -> Tensor:
    """(B, c, ...) -> (B, 2 c): mean and standard deviation of each channel over its positions; vectors stay."""
    if maps.shape[2:].numel() == 1:
        return maps.float().flatten(1)
    values = maps.float().flatten(2)
    return torch.cat([values.mean(2), values.std(2, correction=0)], dim=1)
