"""Backbones for class-incremental learning: residual networks, and the cut into trunk (F1) and tail.

    images (B, 3, H, W) -> stem -> blocks -> maps (B, C, h, w) -> blocks -> mean -> features (B, D) -> head -> logits
                           '-- trunk F1 --'                       '--- tail ---'
                                                                  '-------- F2 = Classifier(tail, head) -----'

`build` makes a backbone by name, or with the caller's own function; `cut` splits it. Trunk and tail share the
backbone's modules: training one trains the other. heads.py holds the heads and Classifier.

He et al., "Deep Residual Learning for Image Recognition" (2016). The option to leave out the last ReLU is from Hou et
al., "Learning a Unified Classifier Incrementally via Rebalancing" (LUCIR, 2019). Deviations: all convolutions are
initialised as LUCIR's, also in the small-image ResNet-18, where GFR keeps PyTorch's default. iCaRL's ResNet-32, whose
shortcut pads channels on both sides, is not provided.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from krnet.config import check_choice, check_int
from krnet.errors import SettingError
from krnet.nn.layers import batch_norm_act

SHORTCUTS = ("A", "B")  # as He et al. name them: A pads with zeros, B is a 1x1 convolution


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a residual network of basic blocks."""

    widths: tuple[int, ...]
    """Channels of each stage; every stage after the first starts by halving height and width."""
    blocks_per_stage: int
    """Basic blocks in each stage."""
    large_images: bool = False
    """7x7 convolution of stride 2 and max-pool as the stem (224 px), instead of one 3x3 convolution."""


class Backbone(Protocol):
    """Any module that maps images (B, C, H, W) to features (B, feature_dim) and can be cut into trunk and tail."""

    feature_dim: int

    @property
    def cuts(self) -> Sequence[int | str]:
        """Values that `cut` accepts."""

    def cut(self, at: Any) -> tuple[nn.Module, nn.Module]:
        """Trunk and tail, which share the modules of the backbone."""

    def __call__(self, images: Tensor) -> Tensor: ...


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation whose statistics can be frozen (freeze_batchnorm)."""

    frozen = False

    def train(self, mode: bool = True) -> BatchNorm:
        super().train(mode and not self.frozen)
        return self


def freeze_batchnorm(module: nn.Module) -> None:
    """Make .train() keep the running statistics fixed and normalise by them; scale and shift still train.

    Like .training, this is a mode and not part of the state_dict.
    """
    for layer in module.modules():
        if isinstance(layer, BatchNorm):
            layer.frozen = True
            layer.train(module.training)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise SettingError(f"cannot freeze a {type(layer).__name__}; build the network with krnet's BatchNorm")


class ConvNorm(nn.Sequential):
    """Convolution, then BatchNorm fused with the ReLU if a third layer is given, then all further layers."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, *rest = self
        assert isinstance(norm, BatchNorm), f"a BatchNorm comes second, not {norm}"
        y = batch_norm_act(conv(x), norm, relu=len(rest) > 0)
        for layer in rest[1:]:
            y = layer(y)
        return y


class PadShortcut(nn.Module):
    """Option A: every stride-th row and column, and zeros as the new channels."""

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
        """Numbers of layers after which it can be cut: 0, or after the stem, one layer, and each basic block, two."""
        return (0, *range(1, 2 * len(self.blocks) + 2, 2))

    def cut(self, at: int) -> tuple[nn.Sequential, nn.Sequential]:
        """Cut after `at` layers, counted as in the KRNet paper: F2's last layer is the classifier, so ResNet-32 cut
        after 23 layers leaves 9. Cut after 0 layers, the trunk is the identity: its maps are the images."""
        parts, num_parts = [self.stem, *self.blocks], self.cuts.index(at)
        return nn.Sequential(*parts[:num_parts]), nn.Sequential(*parts[num_parts:], *self.pool)

    def maps(self, x: Tensor) -> Tensor:
        """Feature maps (B, feature_dim, h, w) of the last block."""
        return self.blocks(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.maps(x))


# ------------------------------------------------------------------ by name

Factory = Callable[..., nn.Module]
"""factory(in_channels=3, and optionally shortcut=, last_relu=) -> Backbone."""
BACKBONES: dict[str, Factory] = {}


def register_backbone(name: str) -> Callable[[Factory], Factory]:
    def add(factory: Factory) -> Factory:
        assert name not in BACKBONES, f"two backbones are called {name}"
        BACKBONES[name] = factory
        return factory

    return add


ARCHITECTURES = {
    "resnet32": Architecture(widths=(16, 32, 64), blocks_per_stage=5),  # CIFAR
    "resnet18": Architecture(widths=(64, 128, 256, 512), blocks_per_stage=2, large_images=True),  # 224 pixels
    "resnet18-small": Architecture(widths=(64, 128, 256, 512), blocks_per_stage=2),  # 32 to 64 pixels, as GFR
    "resnet8": Architecture(widths=(16, 32, 64), blocks_per_stage=1),  # 8x8 digits, for tests and demos
}
for _name, _architecture in ARCHITECTURES.items():
    register_backbone(_name)(partial(ResNet, _architecture))


def build(backbone: str | Factory, *, in_channels: int = 3, **options: Any) -> Any:
    """Make a Backbone from its registered name or from a factory. Options that the factory does not take are dropped.

    shortcut   (ResNet) A pads with zeros, as PyCIL; B is a 1x1 convolution, as LUCIR
    last_relu  (ResNet) False leaves out the last ReLU, as LUCIR does before its cosine head
    """
    factory = backbone if callable(backbone) else BACKBONES.get(backbone)
    if factory is None:
        near = difflib.get_close_matches(str(backbone), BACKBONES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known backbones: {', '.join(BACKBONES)}"
        raise SettingError(f"unknown backbone {backbone!r}; {hint}")
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    chosen = {name: value for name, value in options.items() if takes_any or name in parameters}
    module = factory(in_channels=in_channels, **chosen)
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "feature_dim", None), int):
        raise SettingError(
            f"backbone {backbone_name(backbone)} makes a {type(module).__name__}; expected a module with feature_dim, "
            f"the length of its feature vectors"
        )
    return module


def backbone_name(backbone: str | Factory) -> str:
    """As settings keep it: a registered name, or module and name of a function, with the arguments of a partial."""
    if isinstance(backbone, str):
        return backbone
    if isinstance(backbone, partial):
        arguments = [*map(repr, backbone.args), *(f"{name}={value!r}" for name, value in backbone.keywords.items())]
        return f"{backbone_name(backbone.func)}({', '.join(arguments)})"
    return f"{getattr(backbone, '__module__', '')}.{getattr(backbone, '__qualname__', type(backbone).__qualname__)}"


def cut(backbone: Any, at: int | str) -> tuple[nn.Module, nn.Module]:
    """Trunk: images -> feature maps. Tail: feature maps -> pooled features."""
    cuts = tuple(getattr(backbone, "cuts", ()))
    if at not in cuts:
        possible = ", ".join(map(str, cuts)) or "none: it has no cuts, a property and a method cut(at)"
        raise SettingError(f"cannot cut after {at!r} layers; possible: {possible}")
    trunk, tail = backbone.cut(at)
    # The nn.Sequential objects are new and would report training mode, whatever their layers are in.
    trunk.training = tail.training = backbone.training
    return trunk, tail
