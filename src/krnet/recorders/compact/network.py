"""The network of a compact KRNet: its sizes, what it computes, and how it is read from a file.

codes (B, k) -> axes (k, values) + mean -> maps (B, c, h, w) -> + Refine(maps) -> normalised features

Few samples cannot pay for axes. Then there are none: a code is the map itself, each value less where 0 falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.coding.entropy import RESTORE
from krnet.coding.matrix import MAX_BLOCK, CodedConfig, CodedMatrix, MatrixReader
from krnet.coding.weights import rounding_plan, unpack
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError
from krnet.io.archive import TensorStore
from krnet.nn.sizing import map_shape
from krnet.recorders.axes import AXES, load_axes
from krnet.recorders.base import Stored
from krnet.recorders.basis import stored_edges, stored_matrix
from krnet.recorders.fit import NET, stored_packed

CODES = "codes."
WHOLE = CodedConfig(step=1.0, centroid=0.0, block_size=MAX_BLOCK)  # the scaled axes: read back as whole numbers
SLOPE = 0.01  # below zero, while training: outputs there still learn


@dataclass(frozen=True, kw_only=True)
class CompactConfig:
    """Sizes of a compact KRNet."""

    network: str = "compact"
    step: float
    """Width of a code's bins; the range of each channel is 1."""
    components: int
    """Numbers in a code; 0: there are no axes, and a code is the values themselves."""
    c1: int = 64
    """Channels of the network that repairs the map; 0: there is none, as it would not pay."""
    blocks: int = 2
    """Its blocks, of two convolutions each."""
    bits: float = 5.0
    """Bits of its weights, about."""
    dead_zone: float = 0.5
    """Numbers of a code below so many steps become zero."""
    block_size: int = 16
    """Samples whose codes are coded together: to read one is to read them all."""
    most_bytes: int | None = None
    """What the file is to stay below: the step is moved to it while the network is fitted."""

    def __post_init__(self) -> None:
        check_choice("network", self.network, ("compact",))
        check_range("step", self.step, 1e-6, 1e3)
        check_int("components", self.components, 0, 2**16)
        check_int("c1", self.c1, 0, 2**12)
        check_int("blocks", self.blocks, 0, 64)
        check_range("bits", self.bits, 1, 8)
        check_range("dead_zone", self.dead_zone, 0.5)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)
        if self.most_bytes is not None:
            check_int("most_bytes", self.most_bytes, 1)

    @property
    def coding(self) -> CodedConfig:
        """Numbers are read back as the multiples of the step that the network was fitted to; values, at centroids."""
        zone, centroid = (0.5, 0.0) if self.components else (min(self.dead_zone, 1.0), 1.0)
        return CodedConfig(step=self.step, dead_zone=zone, centroid=centroid, block_size=self.block_size)

    def thinned(self, codes: Tensor) -> Tensor:
        return torch.where(codes.abs() < self.dead_zone * self.step, 0.0, codes)


class Block(nn.Module):
    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.other = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(F.relu(self.one(F.relu(x))))


class Refine(nn.Module):
    """maps (B, c, h, w) -> what they lack"""

    def __init__(self, channels: int, config: CompactConfig, kernel: int):
        super().__init__()
        c1 = config.c1
        self.first = nn.Conv2d(channels, c1, kernel, padding=kernel // 2)
        self.blocks = nn.Sequential(*[Block(c1, kernel) for _ in range(config.blocks)])
        self.last = nn.Conv2d(c1, channels, kernel, padding=kernel // 2)
        for p in self.last.parameters():  # nothing, at first
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.blocks(self.first(x))))


class CompactNet(nn.Module):
    """codes (B, k) -> normalised features (B, c, h, w)"""

    def __init__(self, shape: tuple[int, ...], config: CompactConfig):
        super().__init__()
        self.shape = map_shape(shape)
        self.axes: nn.Parameter | None = None
        self.mean: Tensor
        mean = torch.zeros(math.prod(self.shape))
        if config.components:
            self.axes = nn.Parameter(torch.zeros(config.components, len(mean)))
            self.mean = nn.Parameter(mean)
        else:
            self.register_buffer("mean", mean)  # where 0 falls: it follows from the channels' ranges
        kernel = 3 if self.shape[1] * self.shape[2] > 1 else 1
        self.refine = Refine(self.shape[0], config, kernel) if config.c1 else nn.Module()
        self.register_buffer("unit", torch.ones(()))
        self.unit: Tensor

    def forward(self, codes: Tensor) -> Tensor:
        maps = codes + self.mean if self.axes is None else torch.addmm(self.mean, codes, self.axes)
        maps = maps.view(-1, *self.shape)
        if maps.is_cuda:
            maps = maps.contiguous(memory_format=torch.channels_last)
        found = maps
        if isinstance(self.refine, Refine):
            found = maps + self.unit * self.refine(maps / self.unit)
        return F.leaky_relu(found, SLOPE) if torch.is_grad_enabled() else found.clamp(0, 1)


def stored_tensors(shape: Sequence[int], num_samples: int, config: CompactConfig) -> dict[str, Stored]:
    num_values, num_kept = math.prod(shape), config.components
    found = {**stored_edges(shape), "unit": Stored((), torch.float32)}
    found |= stored_matrix(CODES, num_samples, num_kept or num_values, config.block_size)
    if num_kept:
        found |= {"mean": Stored((num_values,), torch.float16), "scale": Stored((num_kept,), torch.float16)}
        found |= stored_matrix(AXES, num_values, num_kept, MAX_BLOCK, num_decoded=num_values * num_kept)
    if config.c1:
        with torch.device("meta"):
            refine = CompactNet(tuple(shape), config).refine
        found |= stored_packed(NET, refine, rounding_plan(refine, config.bits))
    return found


def zero_map(shape: tuple[int, ...], low: Tensor, high: Tensor) -> Tensor:
    """Where the feature value 0 falls in its channel's range: (values,)."""
    zero = torch.where(high > low, -low / (high - low), 0.0).clamp(0, 1)
    return zero.repeat_interleave(math.prod(shape) // len(zero))


def read_config(settings: Mapping[str, Any]) -> CompactConfig:
    try:
        return from_dict(CompactConfig, settings)
    except InputError as error:
        raise NotARecordingError(f"settings of a compact network refused: {error}. {RESTORE}") from error


def read_network(shape: tuple[int, ...], config: CompactConfig, store: TensorStore) -> CompactNet:
    num_values, k = math.prod(shape), config.components
    with torch.device("meta"):
        net = CompactNet(shape, config)
    shapes = {name: tuple(p.shape) for name, p in net.refine.named_parameters()}
    weights = unpack(store, NET, shapes, rounding_plan(net.refine, config.bits)) if config.c1 else {}
    weights = {f"refine.{name}": value for name, value in weights.items()}
    if k:
        coded = load_axes(store, num_values, k)
        scale = store.tensor("scale", shape=(k,), dtype=torch.float16).float()
        lines = MatrixReader(coded, WHOLE, torch.device("cpu")).read(torch.arange(num_values)).T / scale[:, None]
        weights["axes"] = lines.contiguous()
        weights["mean"] = store.tensor("mean", shape=(num_values,), dtype=torch.float16).float()
    else:
        low, high = (store.tensor(n, shape=(net.shape[0],), dtype=torch.float32) for n in ("low", "high"))
        weights["mean"] = zero_map(net.shape, low, high)
    weights["unit"] = store.tensor("unit", shape=(), dtype=torch.float32)
    net.load_state_dict(weights, assign=True)
    return net


def read_codes(
    num_samples: int, num_values: int, config: CompactConfig, store: TensorStore, device: torch.device
) -> MatrixReader:
    codes = CodedMatrix.load(store, CODES, num_samples, config.components or num_values, config.block_size)
    return MatrixReader(codes, config.coding, device)
