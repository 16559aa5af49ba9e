"""KRNet, the paper's network: net(group, slot) returns the feature map of the sample with that group and slot.

    sample ID -> (group m, slot n) -> embedding (B, 2H) -> decoder -> normalised features (B, c, h, w)

Embedding (the IDs are turned into groups and slots by recorders/paper/groups.py):

    static vector v_s[m]                 -> FC module --+
    dynamic vector v_d[m], shifted by n  -> FC module --+-> embedding (B, 2H)

Decoder:

    (B, d_in) -> FC d0 -> FC d1 -> (B, c0, h0, w0) -> 4 blocks -> deconvolution -> (B, c1, h, w) -> 2 blocks
              -> convolution module -> (B, c, h, w)

Feature vectors skip the spatial layers: (B, d_in) -> FC d0 -> FC d1 -> linear -> (B, c).

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022), sections "Batched ID Embedding" and "Feature
Decoder". Deviations: the presets without "-published" have full convolutions after the deconvolution; the last norm
starts from the mean and standard deviation of the data; a sample may have values of its own (`code`).
docs/choices.md says what we chose where the paper is silent.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.nn.layers import NEGATIVE_SLOPE, depthwise_block, fc_to_map, norm_act
from krnet.nn.paper_config import DecoderConfig, NetworkConfig

NORM_GROUPS = 2  # groups of a GroupNorm; an odd number of channels has one group


class FCModule(nn.Sequential):
    """Fully connected layer, GroupNorm(2), Leaky-ReLU."""

    def __init__(self, d_in: int, d_out: int):
        # No bias: the norm adds its own, and the paper's count of weights has none.
        super().__init__(
            nn.Linear(d_in, d_out, bias=False),
            nn.GroupNorm(NORM_GROUPS, d_out),
        )

    def forward(self, x: Tensor, shape: tuple[int, int, int] | None = None) -> Tensor:
        """(B, d_in) -> (B, d_out), or a batch of maps of the given shape."""
        layer, norm = self
        assert isinstance(layer, nn.Linear) and isinstance(norm, nn.GroupNorm)
        return norm_act(layer(x), norm) if shape is None else fc_to_map(x, layer, norm, shape)


class BatchedIDEmbedding(nn.Module):
    def __init__(self, num_groups: int, group_size: int):
        super().__init__()
        self.static = nn.Parameter(torch.randn(num_groups, group_size))
        self.dynamic = nn.Parameter(torch.randn(num_groups, group_size))
        self.static_fc = FCModule(group_size, group_size)
        self.dynamic_fc = FCModule(group_size, group_size)

    def forward(self, group: Tensor, slot: Tensor) -> Tensor:
        # Not self.static[group]: on a CPU, threads sum its gradient in an order that changes from run to run.
        static, dynamic = (F.embedding(group, vectors) for vectors in (self.static, self.dynamic))
        return torch.cat([self.static_fc(static), self.dynamic_fc(shift(dynamic, slot))], dim=1)  # (B, 2H)


def shift(vectors: Tensor, slot: Tensor) -> Tensor:
    """Shift each row v by its slot n: (A_n v)_i = v_((i + n) mod H). A gather replaces the paper's matrix A_n."""
    size = vectors.shape[1]
    index = (torch.arange(size, device=vectors.device) + slot[:, None]) % size
    return vectors.gather(1, index)


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS if channels % NORM_GROUPS == 0 else 1, channels)


def convolution(c_in: int, c_out: int, kind: str) -> nn.Conv2d:
    groups = c_in if kind == "depthwise" and c_in == c_out else 1
    return nn.Conv2d(c_in, c_out, 3, padding=1, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """x -> convolution, GroupNorm, Leaky-ReLU, convolution, GroupNorm, + x, Leaky-ReLU."""

    def __init__(self, channels: int, kind: str):
        super().__init__()
        self.conv1 = convolution(channels, channels, kind)
        self.norm1 = norm(channels)
        self.conv2 = convolution(channels, channels, kind)
        self.norm2 = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv1.groups > 1:
            return depthwise_block(x, self.conv1, self.norm1, self.conv2, self.norm2)
        return norm_act(self.conv2(norm_act(self.conv1(x), self.norm1)), self.norm2, skip=x)


class DeconvModule(nn.Sequential):
    """Deconvolution, GroupNorm, Leaky-ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        layer, norm = self
        assert isinstance(norm, nn.GroupNorm)
        return norm_act(layer(x), norm)


class Affine(nn.Module):
    """A scale and a shift per channel: a norm without its normalisation."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 2))
        return x * self.weight.view(shape) + self.bias.view(shape)


class Output(nn.Module):
    """The last module: convolution or linear layer, GroupNorm or Affine, Leaky-ReLU."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, channels: int, last_norm: bool):
        super().__init__()
        self.layer = layer
        self.norm: nn.GroupNorm | Affine = norm(channels) if last_norm else Affine(channels)
        if not last_norm:
            # The inputs have a mean square of about 1. With this std the outputs have it too, as after a norm.
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (
            norm_act(x, self.norm)
            if isinstance(self.norm, nn.GroupNorm)
            else F.leaky_relu(self.norm(x), NEGATIVE_SLOPE)
        )

    @torch.no_grad()
    def start_from(self, mean: Tensor, std: Tensor) -> None:
        """Start with each channel's mean and standard deviation as its shift and scale, which doubles the R2 of a short
        fit (notes/choices.md)."""
        self.norm.bias.copy_(mean)
        self.norm.weight.copy_(std)

    @torch.no_grad()
    def rescale(self, scale: Tensor, shift: Tensor) -> None:
        """Turn each channel's output y into scale * y + shift; exact where y and the result are positive."""
        self.norm.weight.mul_(scale)
        self.norm.bias.mul_(scale).add_(shift)


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig, d_in: int):
        super().__init__()
        c0, c1, c = config.c0, config.c1, config.channels
        self.start_shape = (c0, *config.start_size)
        self.fc0 = FCModule(d_in, config.d0)
        self.fc1 = FCModule(config.d0, c0 * config.start_size[0] * config.start_size[1])
        if config.vector:
            self.before: nn.Module = nn.Identity()
            self.deconv: nn.Module = nn.Identity()
            self.after: nn.Module = nn.Identity()
            last: nn.Conv2d | nn.Linear = nn.Linear(c0, c, bias=False)
        else:
            before, after = config.conv_before, config.conv_after
            self.before = nn.Sequential(*[BasicBlock(c0, before) for _ in range(4)])
            self.deconv = DeconvModule(
                nn.ConvTranspose2d(
                    c0, c1, 5, config.stride, padding=2, output_padding=config.output_padding, bias=False
                ),
                norm(c1),
            )
            self.after = nn.Sequential(*[BasicBlock(c1, after) for _ in range(2)])
            last = convolution(c1, c, after)
        self.output = Output(last, c, config.last_norm)
        self.vector = config.vector

    def forward(self, embedding: Tensor) -> Tensor:
        x = self.fc0(embedding)
        if self.vector:
            return self.output(self.fc1(x))
        return self.output(self.after(self.deconv(self.before(self.fc1(x, self.start_shape)))))


class KRNet(nn.Module):
    """(group, slot) of samples -> normalised features. The weights are the storage: fitting is writing."""

    def __init__(self, config: NetworkConfig, num_groups: int, num_samples: int = 0):
        super().__init__()
        self.embed = BatchedIDEmbedding(num_groups, config.group_size)
        self.decoder = Decoder(config, config.input_size)
        self.codes = nn.Parameter(torch.randn(num_samples, config.code)) if config.code else None

    def forward(self, group: Tensor, slot: Tensor, ids: Tensor | None = None) -> Tensor:
        x = self.embed(group, slot)
        if self.codes is not None:
            assert ids is not None, "samples have codes of their own; say which"
            x = torch.cat([x, F.embedding(ids, self.codes).to(x.dtype)], dim=1)
        return self.decoder(x)
