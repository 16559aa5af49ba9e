"""Residual networks for class-incremental learning, their classifiers, and the cut into trunk (F1) and head (F2).

    images (B, 3, H, W) -> stem -> blocks -> maps (B, C, h, w) -> blocks -> mean -> features (B, D) -> head -> logits
                           '-- trunk F1 --'                       '--- tail ---'
                                                                  '-------- F2 = Classifier(tail, head) -----'

`build` makes a backbone by name, `cut` splits it after so many layers. Trunk and tail are the backbone's own modules,
not copies of them: what trains one trains the other.

He et al., "Deep Residual Learning for Image Recognition" (2016); the cosine head and the missing last ReLU are Hou et
al., "Learning a Unified Classifier Incrementally via Rebalancing" (LUCIR, 2019). Convolutions start as LUCIR's do, also
in the small-image ResNet-18, where GFR keeps PyTorch's default. iCaRL's own ResNet-32, which pads channels on both
sides, is not among them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int
from krnet.errors import SettingError
from krnet.nn.layers import batch_norm_act

SHORTCUTS = ("A", "B")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What tells one residual network of basic blocks from another."""

    widths: tuple[int, ...]
    """Channels of each stage; every stage after the first starts by halving height and width."""
    blocks_per_stage: int
    """Basic blocks in each stage."""
    large_images: bool = False
    """7x7 convolution of stride 2 and max-pool as the stem (224 px), instead of one 3x3 convolution."""


BACKBONES: dict[str, Architecture] = {
    "resnet32": Architecture(widths=(16, 32, 64), blocks_per_stage=5),
    "resnet18": Architecture(widths=(64, 128, 256, 512), blocks_per_stage=2, large_images=True),
    "resnet18-small": Architecture(widths=(64, 128, 256, 512), blocks_per_stage=2),
    "resnet8": Architecture(widths=(16, 32, 64), blocks_per_stage=1),
}
"""resnet32: CIFAR. resnet18: 224 px. resnet18-small: 32 to 64 px, as GFR. resnet8: 8x8 digits, for tests and demos."""


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that can be told to keep its statistics (freeze_batchnorm)."""

    frozen = False

    def train(self, mode: bool = True) -> BatchNorm:
        super().train(mode and not self.frozen)
        return self


def freeze_batchnorm(module: nn.Module, frozen: bool = True) -> None:
    """Normalise by the running statistics and leave them as they are, also under .train(); scale and shift still train.

    Like .training, this is a mode and not part of the state_dict.
    """
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.frozen = frozen
            layer.train(module.training)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise SettingError(f"cannot freeze a {type(layer).__name__}; build the network with krnet's BatchNorm")


class ConvNorm(nn.Sequential):
    """Convolution, BatchNorm and, if there is a third layer, ReLU, in few kernels; then what else there is."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, *rest = self
        assert isinstance(norm, BatchNorm), f"a BatchNorm comes second, not {norm}"
        y = batch_norm_act(conv(x), norm, relu=len(rest) > 0)
        for layer in rest[1:]:
            y = layer(y)
        return y


class PadShortcut(nn.Module):
    """Option A: every second value, and zeros for the channels that are new."""

    def __init__(self, c_in: int, c_out: int, stride: int):
        super().__init__()
        self.stride, self.new_channels = stride, c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def make_shortcut(kind: str, c_in: int, c_out: int, stride: int) -> nn.Module:
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(c_in, c_out, stride)
    return ConvNorm(nn.Conv2d(c_in, c_out, 1, stride, bias=False), BatchNorm(c_out))


class BasicBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, shortcut: str):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNorm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = BatchNorm(c_out)
        self.shortcut = make_shortcut(shortcut, c_in, c_out, stride)
        self.last_relu = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(batch_norm_act(self.conv1(x), self.bn1))
        return batch_norm_act(y, self.bn2, self.shortcut(x), self.last_relu)


def make_stem(channels: int, width: int, large_images: bool) -> nn.Sequential:
    if not large_images:
        return ConvNorm(nn.Conv2d(channels, width, 3, padding=1, bias=False), BatchNorm(width), nn.ReLU())
    conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
    return ConvNorm(conv, BatchNorm(width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


class ResNet(nn.Module):
    """images (B, in_channels, H, W) -> pooled features (B, feature_dim); no classifier inside."""

    def __init__(
        self, architecture: Architecture, *, in_channels: int = 3, shortcut: str = "B", last_relu: bool = True
    ):
        super().__init__()
        check_int("in_channels", in_channels, 1)
        check_choice("shortcut", shortcut, SHORTCUTS)
        check_choice("last_relu", last_relu, (True, False))
        width = architecture.widths[0]
        blocks = []
        self.stem = make_stem(in_channels, width, architecture.large_images)
        for stage, c_out in enumerate(architecture.widths):
            for index in range(architecture.blocks_per_stage):
                blocks.append(BasicBlock(width, c_out, 2 if stage > 0 and index == 0 else 1, shortcut))
                width = c_out
        blocks[-1].last_relu = last_relu
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.feature_dim = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of layers after which it can be cut: the stem is one, each basic block two more."""
        return tuple(range(1, 2 * len(self.blocks) + 2, 2))

    def maps(self, x: Tensor) -> Tensor:
        """Feature maps (B, feature_dim, h, w) of the last block."""
        return self.blocks(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.maps(x))


def build(name: str, *, in_channels: int = 3, shortcut: str = "B", last_relu: bool = True) -> ResNet:
    """A new backbone. Shortcut A pads with zeros (PyCIL), B projects (LUCIR); LUCIR's cosine head goes without the
    last ReLU."""
    if name not in BACKBONES:
        near = difflib.get_close_matches(name, BACKBONES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known backbones: {', '.join(BACKBONES)}"
        raise SettingError(f"unknown backbone {name!r}; {hint}")
    return ResNet(BACKBONES[name], in_channels=in_channels, shortcut=shortcut, last_relu=last_relu)


def cut(backbone: ResNet, layers: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Trunk: images -> feature maps, of so many layers. Tail: feature maps -> pooled features.

    Counted as in the paper, where the classifier is the last layer of F2: ResNet-32 cut after 23 leaves 9.
    """
    if layers not in backbone.cuts:
        raise SettingError(f"cannot cut after {layers!r} layers; possible: {', '.join(map(str, backbone.cuts))}")
    blocks, num_blocks = list(backbone.blocks), backbone.cuts.index(layers)
    trunk = nn.Sequential(backbone.stem, *blocks[:num_blocks])
    tail = nn.Sequential(*blocks[num_blocks:], *backbone.pool)
    # A new Sequential would say it is training, whatever its parts do.
    trunk.training = tail.training = backbone.training
    return trunk, tail
