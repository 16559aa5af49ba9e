"""Feature decoder: an embedding vector becomes a feature map.

    (B, d_in) -> FC d0 -> FC d1 -> (B, c0, h0, w0) -> 4 blocks -> deconvolution -> (B, c1, h, w) -> 2 blocks
              -> convolution module -> (B, c, h, w)

Vectors skip the spatial layers:  (B, d_in) -> FC d0 -> FC d1 -> linear -> (B, c).

Zhang et al., "KRNet", section "Feature Decoder". Where the paper is silent, docs/choices.md says what we chose.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import NetworkConfig
from krnet.embedding import NEGATIVE_SLOPE, NORM_GROUPS, FCModule


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS if channels % NORM_GROUPS == 0 else 1, channels)


def convolution(c_in: int, c_out: int, kind: str) -> nn.Conv2d:
    groups = c_in if kind == "depthwise" and c_in == c_out else 1
    return nn.Conv2d(c_in, c_out, 3, padding=1, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """conv, GN, LReLU, conv, GN, plus the skip, LReLU."""

    def __init__(self, channels: int, kind: str):
        super().__init__()
        self.conv1 = convolution(channels, channels, kind)
        self.norm1 = norm(channels)
        self.conv2 = convolution(channels, channels, kind)
        self.norm2 = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm1(self.conv1(x)), NEGATIVE_SLOPE)
        return F.leaky_relu(self.norm2(self.conv2(y)) + x, NEGATIVE_SLOPE)


class Output(nn.Module):
    """The last module: convolution (or FC), GroupNorm, Leaky-ReLU, and each sample's own amplitude.

    A GroupNorm gives every sample the same mean and variance, which signed or uneven maps do not have. With
    `amplitude` a linear layer reads from the FC hidden vector how far each channel departs from that, starting at
    "not at all".
    """

    def __init__(self, layer: nn.Module, channels: int, d_hidden: int, amplitude: bool):
        super().__init__()
        self.layer = layer
        self.norm = norm(channels)
        self.amplitude = nn.Linear(d_hidden, 2 * channels, bias=False) if amplitude else None
        if self.amplitude is not None:
            nn.init.zeros_(self.amplitude.weight)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        if self.amplitude is not None:
            scale, shift = self.amplitude(hidden).reshape(len(hidden), -1, *[1] * (y.ndim - 2)).chunk(2, dim=1)
            y = y * (1 + scale) + shift
        return F.leaky_relu(y, NEGATIVE_SLOPE)

    @torch.no_grad()
    def start_from(self, mean: Tensor, std: Tensor) -> None:
        """Begin with each channel's own mean and deviation: the largest lead of all (docs/choices.md)."""
        self.norm.bias.copy_(mean)
        self.norm.weight.copy_(std)


class Decoder(nn.Module):
    def __init__(self, config: NetworkConfig, d_in: int):
        super().__init__()
        c0, c1, c = config.c0, config.c1, config.channels
        self.start_shape = (c0, *config.start_size)
        self.fc0 = FCModule(d_in, config.d0)
        self.fc1 = FCModule(config.d0, c0 * config.start_size[0] * config.start_size[1])
        if config.vector:
            self.before = self.deconv = self.after = nn.Identity()
            last: nn.Module = nn.Linear(c0, c, bias=False)
        else:
            before, after = config.conv_before, config.conv_after
            self.before = nn.Sequential(*[BasicBlock(c0, before) for _ in range(4)])
            self.deconv = nn.Sequential(
                nn.ConvTranspose2d(
                    c0, c1, 5, config.stride, padding=2, output_padding=config.output_padding, bias=False
                ),
                norm(c1),
                nn.LeakyReLU(NEGATIVE_SLOPE),
            )
            self.after = nn.Sequential(*[BasicBlock(c1, after) for _ in range(2)])
            last = convolution(c1, c, after)
        self.output = Output(last, c, config.d0, config.amplitude)
        self.vector = config.vector

    def forward(self, embedding: Tensor) -> Tensor:
        hidden = self.fc0(embedding)
        x = self.fc1(hidden)
        if not self.vector:
            x = self.after(self.deconv(self.before(x.unflatten(1, self.start_shape))))
        return self.output(x, hidden)
