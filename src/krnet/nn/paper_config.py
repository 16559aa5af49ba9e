"""Sizes of the paper's networks, and its presets. Nothing here needs torch.

DecoderConfig   the decoder alone, which the autoencoder has as well
NetworkConfig   the whole KRNet: batched ID embedding and decoder
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from krnet.config import check_choice, check_int, check_range
from krnet.errors import SettingError

CONVOLUTIONS = ("depthwise", "full")
KERNEL = 5  # of the deconvolution
GEOMETRY = frozenset({"channels", "height", "width", "vector"})
"""Settings that follow from the features."""


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
    """Width of the first FC layer of the decoder."""
    c0: int
    """Channels before the deconvolution; for a vector, width of the second FC layer."""
    c1: int
    """Channels after the deconvolution."""
    stride: int = 1
    """s_d, the stride of the deconvolution: the first map has ceil(height / stride) rows."""
    conv_before: str = "depthwise"
    """3x3 convolutions before the deconvolution: depthwise or full."""
    conv_after: str = "full"
    """3x3 convolutions after the deconvolution: depthwise or full."""
    last_norm: bool = False
    """GroupNorm in the last module, as in the paper. It gives every sample the same mean and variance; without
    it (a scale and shift per channel instead) each keeps its own amplitude, and only Muon fits it well."""

    def __post_init__(self) -> None:
        for name in ("channels", "height", "width", "d0", "c0", "c1"):
            check_int(name, getattr(self, name), 1, 2**24)
        check_int("stride", self.stride, 1, KERNEL)
        start_area = self.start_size[0] * self.start_size[1]
        self._check_normed("d0", self.d0)
        self._check_normed("c0", self.c0 * start_area)
        # A GroupNorm over a single value would leave nothing of it.
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
        """What a deconvolution of that stride lacks to reach height x width: 0 to stride - 1."""
        h0, w0 = self.start_size
        return self.height - 1 - (h0 - 1) * self.stride, self.width - 1 - (w0 - 1) * self.stride


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(DecoderConfig):
    """Sizes of a KRNet."""

    group_size: int = 512
    """H: most samples per group, and length of the static and of the dynamic vector."""
    bits: float | None = None
    """Bits of a weight in the file, about: it is trained for this precision and entropy-coded. None keeps fp32."""
    code: int = 0
    """Learned numbers that each sample has beside its ID."""
    code_bits: float = 4.0
    """Bits of such a number, where `bits` is given, too."""

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
        """Numbers that the decoder reads: both vectors of the group, and the sample's own."""
        return 2 * self.group_size + self.code


PRESETS: dict[str, dict[str, Any]] = {
    # The paper's table of settings, with full convolutions after the deconvolution: they learn faster.
    "cifar100": {"group_size": 512, "d0": 1024, "c0": 512, "c1": 64, "stride": 1, "last_norm": True},
    "imagenet": {"group_size": 512, "d0": 1536, "c0": 1024, "c1": 256, "stride": 2, "last_norm": True},
}
# Depthwise ones throughout: the only reading that gives the sizes the paper prints.
PRESETS |= {f"{name}-published": preset | {"conv_after": "depthwise"} for name, preset in PRESETS.items()}

# What the paper changes for ImageNet-Subset; with schedule "paper" the presets bring it along.
PAPER_FITS: dict[str, dict[str, Any]] = {
    name: {"iterations": 50000, "gamma": 5e-4} for name in ("imagenet", "imagenet-published")
}
