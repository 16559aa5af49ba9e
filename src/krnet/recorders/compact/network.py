"""The compact network: its config, what it computes, and how it is read from a file.

    codes (B, k) -> @ axes (k, values) + mean -> maps (B, c, h, w) -> + Refine(maps) -> normalised features

Without axes (components=0) a code is the map itself, minus `zero_map`: codes (B, values) + zero_map -> maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.coding.matrix import MAX_BLOCK, CodedConfig, CodedMatrix, MatrixReader
from krnet.coding.weights import rounding_plan, unpack
from krnet.config import check_choice, check_int, check_range, from_dict
from krnet.errors import InputError, NotARecordingError
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE
from krnet.nn.sizing import map_shape
from krnet.recorders.axes import AXES, decode_axes, load_axes
from krnet.recorders.base import Stored
from krnet.recorders.basis import stored_edges, stored_matrix
from krnet.recorders.fit import NET, stored_packed
from krnet.recorders.memory import block_numbers, map_numbers

CODES = "codes."  # prefix of the tensors that hold the coded codes
AXES_CODING = CodedConfig(step=1.0, centroid=0.0, block_size=MAX_BLOCK)  # scaled axes are decoded to whole numbers
MAX_STEP = 1e3  # no channel is wider than 1: a fit whose budget is too small for any code ends here
NEGATIVE_SLOPE = 0.01  # of the last ReLU while training, so that outputs below 0 get a gradient


@dataclass(frozen=True, kw_only=True)
class CompactConfig:
    """Settings of a compact KRNet."""

    network: str = "compact"
    step: float
    """Quantisation step of the codes; features are scaled to a range of 1 per channel."""
    components: int
    """Numbers in a code, one for each axis; 0: no axes, a code is the feature map itself."""
    c1: int = 64
    """Channels of the network that refines the map; 0: no network."""
    blocks: int = 2
    """Residual blocks of that network, of two convolutions each."""
    bits: float = 5.0
    """Average bits per weight of that network, approximately."""
    dead_zone: float = 0.5
    """Numbers of a code whose size is below dead_zone * step become 0."""
    block_size: int = 16
    """Samples whose codes are entropy-coded as one block; reading one of them decodes the whole block."""
    most_bytes: int | None = None
    """Largest size of the file; the fit adjusts the step to meet it."""
    refined: int | None = None
    """The network refines this many samples, the first ones; None: all. It may know only those it was fitted to."""

    def __post_init__(self) -> None:
        check_choice("network", self.network, ("compact",))
        check_range("step", self.step, 1e-6, MAX_STEP)
        check_int("components", self.components, 0, 2**16)
        check_int("c1", self.c1, 0, 2**12)
        check_int("blocks", self.blocks, 0, 64)
        check_range("bits", self.bits, 1, 8)
        check_range("dead_zone", self.dead_zone, 0.5)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)
        if self.most_bytes is not None:
            check_int("most_bytes", self.most_bytes, 1)
        if self.refined is not None:
            check_int("refined", self.refined, 1)

    def to_settings(self) -> dict[str, Any]:
        """Plain values for the file's header, without a `refined` of None: versions that lack the setting read it."""
        return {name: value for name, value in asdict(self).items() if name != "refined" or value is not None}

    @property
    def coding(self) -> CodedConfig:
        """How the codes are entropy-coded.

        With axes, symbols are decoded to multiples of the step, which the network was trained on. Without axes, they
        are decoded to the centroids of their bins.
        """
        zone, centroid = (0.5, 0.0) if self.components else (min(self.dead_zone, 1.0), 1.0)
        return CodedConfig(step=self.step, dead_zone=zone, centroid=centroid, block_size=self.block_size)

    def apply_dead_zone(self, codes: Tensor) -> Tensor:
        return torch.where(codes.abs() < self.dead_zone * self.step, 0.0, codes)


class Block(nn.Module):
    """A residual block: x (B, c, h, w) -> x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)
        self.other = nn.Conv2d(channels, channels, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(F.relu(self.one(F.relu(x))))


class Refine(nn.Module):
    """maps (B, c, h, w) -> the correction that is added to them (B, c, h, w)"""

    def __init__(self, channels: int, config: CompactConfig, kernel: int):
        super().__init__()
        c1 = config.c1
        self.first = nn.Conv2d(channels, c1, kernel, padding=kernel // 2)
        self.blocks = nn.Sequential(*[Block(c1, kernel) for _ in range(config.blocks)])
        self.last = nn.Conv2d(c1, channels, kernel, padding=kernel // 2)
        for p in self.last.parameters():  # the correction starts at 0
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
            self.register_buffer("mean", mean)  # the zero_map: not trained, it follows from the channels' ranges
        kernel = 3 if self.shape[1] * self.shape[2] > 1 else 1
        self.refine = Refine(self.shape[0], config, kernel) if config.c1 else nn.Module()
        self.register_buffer("unit", torch.ones(()))  # standard deviation of the features: scales what Refine sees
        self.unit: Tensor

    def forward(self, codes: Tensor, gate: Tensor | None = None) -> Tensor:
        """gate (B, 1, 1, 1): 0 for samples that are not refined; None: all are."""
        maps = codes + self.mean if self.axes is None else torch.addmm(self.mean, codes, self.axes)
        maps = maps.view(-1, *self.shape)
        if maps.is_cuda:
            maps = maps.contiguous(memory_format=torch.channels_last)
        output = maps
        if isinstance(self.refine, Refine):
            correction = self.unit * self.refine(maps / self.unit)
            output = maps + (correction if gate is None else gate * correction)
        return F.leaky_relu(output, NEGATIVE_SLOPE) if torch.is_grad_enabled() else output.clamp(0, 1)


class GatedNet(nn.Module):
    """codes and gate (B, k + 1) -> normalised features (B, c, h, w)"""

    def __init__(self, net: CompactNet):
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.net(inputs[:, :-1], inputs[:, -1:, None, None])
        return features


def stored_tensors(shape: Sequence[int], num_samples: int, config: CompactConfig) -> dict[str, Stored]:
    """The tensors of a file with this config."""
    num_values, num_axes = math.prod(shape), config.components
    stored = {**stored_edges(shape), "unit": Stored((), torch.float32)}
    stored |= stored_matrix(CODES, num_samples, num_axes or num_values, config.block_size)
    if num_axes:
        stored |= {"mean": Stored((num_values,), torch.float16), "scale": Stored((num_axes,), torch.float16)}
        stored |= stored_matrix(AXES, num_values, num_axes, MAX_BLOCK, num_decoded=num_values * num_axes)
    if config.c1:
        with torch.device("meta"):
            refine = CompactNet(tuple(shape), config).refine
        stored |= stored_packed(NET, refine, rounding_plan(refine, config.bits))
    return stored


def working_numbers(shape: Sequence[int], config: CompactConfig) -> int:
    """Numbers that exist at once while a few samples are replayed: a block of codes, and the network's maps."""
    num_values = math.prod(shape)
    area = num_values // (shape[0] if shape else 1)
    return block_numbers(config.block_size, config.components or num_values) + map_numbers(num_values, config.c1 * area)


def zero_map(shape: tuple[int, ...], low: Tensor, high: Tensor) -> Tensor:
    """(values,): what the feature value 0 becomes when its channel's range [low, high] is scaled to [0, 1]."""
    zero = torch.where(high > low, -low / (high - low), 0.0).clamp(0, 1)
    return zero.repeat_interleave(math.prod(shape) // len(zero))


def read_config(settings: Mapping[str, Any]) -> CompactConfig:
    """The config in a file's header."""
    try:
        return from_dict(CompactConfig, settings)
    except InputError as error:
        raise NotARecordingError(f"settings of a compact network refused: {error}. {RESTORE}") from error


def read_network(shape: tuple[int, ...], config: CompactConfig, store: TensorStore) -> CompactNet:
    """The network in a file: refining weights, axes and mean."""
    num_values, k = math.prod(shape), config.components
    with torch.device("meta"):
        net = CompactNet(shape, config)
    shapes = {name: tuple(p.shape) for name, p in net.refine.named_parameters()}
    weights = unpack(store, NET, shapes, rounding_plan(net.refine, config.bits)) if config.c1 else {}
    weights = {f"refine.{name}": value for name, value in weights.items()}
    if k:
        coded = load_axes(store, num_values, k)
        scale = store.tensor("scale", shape=(k,), dtype=torch.float16).float()
        weights["axes"] = decode_axes(coded, AXES_CODING, scale)  # (k, values)
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
    """A reader of the codes in a file: ids (B,) -> codes (B, k), or (B, values) without axes."""
    codes = CodedMatrix.load(store, CODES, num_samples, config.components or num_values, config.block_size)
    return MatrixReader(codes, config.coding, device)
