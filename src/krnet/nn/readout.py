"""What a head reads of a feature map, statistics of the map and of every layer behind it; and heads that read it.

    maps (B, c, h, w) -> layer 1 -> maps -> layer 2 -> maps -> ...
          '- mean and standard deviation over positions, of each channel of each of them -' -> readings (B, D)
    readings (B, D) -> standardise by the base task's -> ReadingHead -> scores (B, classes)

A last layer knows what it was trained for; the layers before it know more about classes that came later.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEAST_STD = 1e-6  # a reading that never changes is left as it is


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


class ReadingHead(nn.Module):
    """The base of heads that read standardised readings. Without `standardise` they are taken as they are."""

    def __init__(self, num_readings: int, *, standardise: bool = True):
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.zeros(num_readings))
        # 0 until the first readings set the scale.
        self.register_buffer("std", torch.zeros(num_readings) if standardise else torch.ones(num_readings))

    def set_scale(self, readings: Tensor) -> None:
        """Standardise by these readings (N, D), unless the scale is set already."""
        if not self.std.any():
            std, mean = torch.std_mean(readings, 0, correction=0)
            self.mean.copy_(mean)
            self.std.copy_(torch.where(std > LEAST_STD, std, torch.ones_like(std)))

    def standardised(self, readings: Tensor) -> Tensor:
        return (readings - self.mean) / self.std
