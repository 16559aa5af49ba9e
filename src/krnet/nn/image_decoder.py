"""A network that makes images of feature maps: how much of an image its features give away is measured with it.

    features (B, C, H, W) -> resize, conv, halve while larger than the image -> residual blocks, double, ... -> image
    features (B, ...)     -> linear layer to maps of 4x4 ---------------------'

It adds to the mean image of the training half, so that it begins with what it would know without any feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CORE = 4  # height and width of the maps that a vector becomes
GROUPS = 8  # of each norm; channels are a multiple of it
LEAST_CHANNELS = 16
CORE_BLOCKS, LATER_BLOCKS = 3, 1  # residual blocks at the size of the features, where they are cheap, and per doubling


class ResidualBlock(nn.Sequential):
    def __init__(self, channels: int):
        super().__init__(*_norm_act_conv(channels, channels), *_norm_act_conv(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class ImageDecoder(nn.Module):
    """Features of one shape -> images (B, c, h, w), values about 0 to 1."""

    mean: Tensor
    std: Tensor
    mean_image: Tensor

    def __init__(self, shape: Sequence[int], image_shape: Sequence[int], width: int):
        """width: channels at the size of the features; each doubling of the size halves them."""
        super().__init__()
        self.shape, self.image_shape = tuple(shape), tuple(image_shape)
        channels, height, image_width = self.image_shape
        self.is_map = len(self.shape) == 3 and min(self.shape[1:]) > 1
        size = self.shape[1:] if self.is_map else (CORE, CORE)
        ratio = min(height / size[0], image_width / size[1])
        doublings, halvings = max(0, round(math.log2(ratio))), max(0, math.floor(-math.log2(ratio)))
        self.core = tuple(-(-side // 2**doublings) for side in (height, image_width))
        self.input_size = tuple(side * 2**halvings for side in self.core)
        stages = [max(LEAST_CHANNELS, width // 2**stage) // GROUPS * GROUPS for stage in range(doublings + 1)]
        stem: list[nn.Module]
        if self.is_map:
            stem = [nn.Conv2d(self.shape[0], stages[0], 3, padding=1)]
        else:
            num_values = math.prod(self.shape)
            stem = [nn.Linear(num_values, stages[0] * CORE**2), nn.Unflatten(1, (stages[0], CORE, CORE))]
        self.stem = nn.Sequential(*stem)
        layers: list[nn.Module] = [nn.Conv2d(stages[0], stages[0], 3, 2, 1) for _ in range(halvings)]
        for stage, now in enumerate(stages):
            if stage:
                layers += [nn.Conv2d(stages[stage - 1], 4 * now, 3, padding=1), nn.PixelShuffle(2)]
            layers += [ResidualBlock(now) for _ in range(LATER_BLOCKS if stage else CORE_BLOCKS)]
        self.body = nn.Sequential(*layers)
        self.last = nn.Sequential(*_norm_act_conv(stages[-1], channels))
        for weights in self.last[-1].parameters():
            nn.init.zeros_(weights)
        per_value = (self.shape[0], 1, 1) if self.is_map else (math.prod(self.shape),)
        self.register_buffer("mean", torch.zeros(per_value))
        self.register_buffer("std", torch.ones(per_value))
        self.register_buffer("mean_image", torch.zeros(self.image_shape))

    def learn_scale(self, features: Tensor) -> None:
        """Take mean and standard deviation from a sample of features: of each channel, or of each value of vectors."""
        features = features.float()
        values = features.transpose(0, 1).flatten(1) if self.is_map else features.reshape(len(features), -1).T
        self.mean.copy_(values.mean(1).view(self.mean.shape))
        self.std.copy_(values.std(1, unbiased=False).clamp(min=1e-6).view(self.std.shape))

    def forward(self, features: Tensor) -> Tensor:
        x = features if self.is_map else features.reshape(len(features), -1)
        x = (x - self.mean) / self.std
        if self.is_map:
            x = _resize(x, self.input_size)
        x = self.stem(x)
        if not self.is_map:
            x = _resize(x, self.input_size)
        x = self.last(self.body(x))
        return self.mean_image + x[..., : self.image_shape[1], : self.image_shape[2]].float()


def _norm_act_conv(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.GroupNorm(GROUPS, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)]


def _resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    return x if tuple(x.shape[2:]) == size else F.interpolate(x, size, mode="bilinear", align_corners=False)
