"""Sizes of the paper's network, and its presets. Nothing here needs torch.

DecoderConfig   the decoder alone, which the autoencoder uses too
NetworkConfig   the whole KRNet: batched ID embedding and decoder
PRESETS         the paper's table of sizes

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from krnet.config import check_choice, check_int, check_range
from krnet.errors import SettingError

CONVOLUTIONS = ("depthwise", "full")
KERNEL = 5  # width of the deconvolution kernel
GEOMETRY = frozenset({"channels", "height", "width", "vector"})
"""Settings that are computed from the features, not chosen."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder for feature maps of channels x height x width (a vector has height = width = 1)."""

    channels: int
    """Channels of a feature map, or length of a feature vector."""
    height: int
    """Height of a feature map."""
    width: int
    """Width of a feature map."""
    vector: bool = False
    """Features are vectors: the spatial layers are left out."""
    d0: int
    """Outputs of the first FC layer of the decoder."""
    c0: int
    """Channels before the deconvolution; for a vector, outputs of the second FC layer."""
    c1: int
    """Channels after the deconvolution."""
    stride: int = 1
    """s_d, the stride of the deconvolution: the first map has ceil(height / stride) rows."""
    conv_before: str = "depthwise"
    """3x3 convolutions before the deconvolution: depthwise or full."""
    conv_after: str = "full"
    """3x3 convolutions after the deconvolution: depthwise or full."""
    last_norm: bool = False
    """GroupNorm in the last module, as in the paper. It gives every sample the same mean and variance. Off: a scale and
    a shift per channel, so that each sample keeps its amplitude; only Muon fits this well."""

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width", "d0", "c0", "c1"):
            check_int(name, getattr(self, name), 1, 2**24)
        check_int("stride", self.stride, 1, KERNEL)
        start_area = self.start_size[0] * self.start_size[1]
        self._check_normed("d0", self.d0)
        self._check_normed("c0", self.c0 * start_area)
        # GroupNorm turns a group of a single value into 0.
        area = self.height * self.width
        if not self.vector and self.c1 * area <= 2:
            raise SettingError(f"c1 is {self.c1}; GroupNorm on maps of one value needs more than 2 channels")
        if self.last_norm and self.channels * area <= 2:
            raise SettingError(f"last_norm is on; features of {self.channels} channels and {area} values need it off")
        check_choice("conv_before", self.conv_before, CONVOLUTIONS)
        check_choice("conv_after", self.conv_after, CONVOLUTIONS)
        check_choice("last_norm", self.last_norm, (True, False))

    def _check_normed(self, name: str, size: int) -> None:
        if size % 2 or size < 4:
            raise SettingError(f"{name} is {getattr(self, name)}; GroupNorm(2) needs an even number of 4 or more")

    @property
    def start_size(self) -> tuple[int, int]:
        """h0 x w0, the size of the map before the deconvolution."""
        return -(-self.height // self.stride), -(-self.width // self.stride)

    @property
    def output_padding(self) -> tuple[int, int]:
        """Rows and columns, 0 to stride - 1, that the deconvolution must add to reach height x width."""
        h0, w0 = self.start_size
        return self.height - 1 - (h0 - 1) * self.stride, self.width - 1 - (w0 - 1) * self.stride


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(DecoderConfig):
    """Sizes of a KRNet."""

    group_size: int = 512
    """H: largest number of samples in a group, and length of the static and of the dynamic vector."""
    bits: float | None = None
    """Approximate bits per weight in the file; weights are trained for this precision and entropy-coded. None keeps
    fp32."""
    code: int = 0
    """Number of learned values stored for each sample, which the decoder reads beside its embedding."""
    code_bits: float = 4.0
    """Approximate bits of each such value, if `bits` is given."""

    def __post_init__(self) -> None:
        check_int("group_size", self.group_size, 4, 2**16)
        self._check_normed("group_size", self.group_size)
        super().__post_init__()
        check_int("code", self.code, 0, 2**16)
        if self.bits is not None:
            check_range("bits", self.bits, 1, 8)
        check_range("code_bits", self.code_bits, 1, 8)

    @property
    def input_size(self) -> int:
        """Length of the decoder's input: both vectors of the group (2 H) and the sample's own values."""
        return 2 * self.group_size + self.code


PRESETS: dict[str, dict[str, Any]] = {
    # The paper's table of sizes, but with full convolutions after the deconvolution, which learn faster.
    "cifar100": {"group_size": 512, "d0": 1024, "c0": 512, "c1": 64, "stride": 1, "last_norm": True},
    "imagenet": {"group_size": 512, "d0": 1536, "c0": 1024, "c1": 256, "stride": 2, "last_norm": True},
}
# Depthwise convolutions everywhere: the only reading that gives the file sizes printed in the paper.
PRESETS |= {f"{name}-published": preset | {"conv_after": "depthwise"} for name, preset in PRESETS.items()}

# Fit settings that the paper changes for ImageNet-Subset; schedule "paper" applies them with these presets.
PAPER_FITS: dict[str, dict[str, Any]] = {
    name: {"iterations": 50000, "gamma": 5e-4} for name in ("imagenet", "imagenet-published")
}

# Shape of the feature maps (c, h, w) -> the paper's network for it.
PRESET_SHAPES: dict[tuple[int, ...], str] = {
    (64, 8, 8): "cifar100",
    (256, 14, 14): "imagenet",
    (256, 16, 16): "imagenet",
}
