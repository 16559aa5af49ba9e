"""The compact network: its config, what it computes, and how it is read from a file.

    codes (B, P k) -> @ axes (k, values of a block), joined, + mean -> maps (B, c, h, w) -> + Refine(maps)
                   -> normalised features

A map is cut into P blocks, which share their axes (recorders/grids.py); without `block` the map is the block. Without
axes (components=0) a code is the map itself, minus `zero_map`: codes (B, values) + zero_map -> maps.
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
from krnet.errors import SettingError
from krnet.io.archive import TensorStore
from krnet.recorders.axes import AXES, decode_axes, load_axes
from krnet.recorders.base import Stored
from krnet.recorders.basis import stored_matrix
from krnet.recorders.checks import reading_settings
from krnet.recorders.grids import Grid
from krnet.recorders.memory import block_numbers, map_numbers
from krnet.recorders.network_sizes import NET, multiplications, stored_packed
from krnet.recorders.ranges import read_range, stored_range

CODES = "codes."  # prefix of the tensors that hold the coded codes
AXES_CODING = CodedConfig(step=1.0, centroid=0.0, block_size=MAX_BLOCK)  # scaled axes are decoded to whole numbers
START_ZONE = 0.65  # dead zone of codes that no training has moved, as in transform.py
MAX_STEP = 1e3  # no channel is wider than 1: a fit whose budget is too small for any code ends here
NEGATIVE_SLOPE = 0.01  # of the last ReLU while training, so that outputs below 0 get a gradient
# Settings that earlier versions do not know: the header leaves them out at these values, and old versions read it.
NEW_SETTINGS: dict[str, Any] = {"refined": None, "block": None, "dct": False, "centroid": 0.0}


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
    block: tuple[int, ...] | None = None
    """Channels, height and width of the blocks that maps are cut into; each divides that of the map. None: the map."""
    dct: bool = False
    """A DCT over the blocks of a map decorrelates their coordinates."""
    centroid: float = 0.0
    """Where in its bin a number of a code is read back, as in recorder transform. Trained codes are read back at the
    middle, which they were trained for; without axes, always at the centroid."""

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
        check_choice("dct", self.dct, (True, False))
        check_range("centroid", self.centroid, -1, 1)
        if self.block is not None:
            object.__setattr__(self, "block", check_block(self.block))

    def to_settings(self) -> dict[str, Any]:
        """Plain values for the file's header."""
        settings = {n: v for n, v in asdict(self).items() if n not in NEW_SETTINGS or v != NEW_SETTINGS[n]}
        return settings if self.block is None else {**settings, "block": list(self.block)}

    def grid(self, shape: Sequence[int]) -> Grid:
        """How samples of this shape are cut."""
        return Grid.of(shape, self.block, self.dct)

    def num_columns(self, shape: Sequence[int]) -> int:
        """Numbers in the code of a sample."""
        return self.components * self.grid(shape).num_blocks if self.components else math.prod(shape)

    @property
    def has_centroids(self) -> bool:
        """Whether symbols are decoded away from the middles of their bins."""
        return not self.components or self.centroid != 0

    @property
    def coding(self) -> CodedConfig:
        """How the codes are entropy-coded.

        Codes that were trained along axes are decoded to multiples of the step; others towards the centroids of their
        bins.
        """
        if not self.has_centroids:
            return CodedConfig(step=self.step, block_size=self.block_size, centroid=0.0)
        centroid = self.centroid if self.components else 1.0
        zone = min(self.dead_zone, 1.0)
        return CodedConfig(step=self.step, dead_zone=zone, centroid=centroid, block_size=self.block_size)

    def apply_dead_zone(self, codes: Tensor) -> Tensor:
        """Make the quantiser send all codes inside the dead zone to symbol 0.

        Where symbols are decoded to centroids, codes inside count in that of symbol 0, and are kept. The quantiser's
        own zone ends at one step: codes between that and a wider zone are clamped to just below one step.
        """
        edge = 0.999 * self.step if self.has_centroids else 0.0
        return torch.where(codes.abs() < self.dead_zone * self.step, codes.clamp(-edge, edge), codes)


def check_block(block: Any) -> tuple[int, ...]:
    """The block as a tuple of three sizes."""
    if not isinstance(block, (list, tuple)) or len(block) != 3:
        raise SettingError(f"block is {block!r}; expected three sizes: channels, height, width")
    for size in block:
        check_int("block", size, 1)
    return tuple(block)


def check_grid(config: CompactConfig, shape: Sequence[int]) -> None:
    """Refuse a block that does not divide maps of this shape."""
    grid = config.grid(shape)
    if not grid.is_cut_evenly:
        raise SettingError(
            f"block is {list(grid.block)}, and maps of shape {list(shape)} have {list(grid.shape)} channels, rows and "
            f"columns; take divisors of these"
        )


class Block(nn.Module):
    """A residual block: x (B, c, h, w) -> x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int, kernel: tuple[int, int]):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, kernel, padding=(kernel[0] // 2, kernel[1] // 2))
        self.other = nn.Conv2d(channels, channels, kernel, padding=(kernel[0] // 2, kernel[1] // 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(F.relu(self.one(F.relu(x))))


class Refine(nn.Module):
    """maps (B, c, h, w) -> the correction that is added to them (B, c, h, w)"""

    def __init__(self, channels: int, config: CompactConfig, kernel: tuple[int, int]):
        super().__init__()
        c1 = config.c1
        self.first = nn.Conv2d(channels, c1, kernel, padding=(kernel[0] // 2, kernel[1] // 2))
        self.blocks = nn.Sequential(*[Block(c1, kernel) for _ in range(config.blocks)])
        self.last = nn.Conv2d(c1, channels, kernel, padding=(kernel[0] // 2, kernel[1] // 2))
        for p in self.last.parameters():  # the correction starts at 0
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.blocks(self.first(x))))


class CompactNet(nn.Module):
    """codes (B, P k) -> normalised features (B, c, h, w)"""

    def __init__(self, shape: tuple[int, ...], config: CompactConfig):
        super().__init__()
        self.grid = config.grid(shape)
        self.shape = self.grid.shape
        self.axes: nn.Parameter | None = None
        self.mean: Tensor
        mean = torch.zeros(self.grid.num_values)
        if config.components:
            self.axes = nn.Parameter(torch.zeros(config.components, self.grid.block_values))
            self.mean = nn.Parameter(mean)
        else:
            self.register_buffer("mean", mean)  # the zero_map: not trained, it follows from the channels' ranges
        sides = (1, self.shape[0]) if self.grid.is_sequence else self.shape[1:]
        kernel = (3, 3) if math.prod(sides) > 1 else (1, 1)
        kernel = (1, 3) if self.grid.is_sequence else kernel
        channels = self.shape[2] if self.grid.is_sequence else self.shape[0]  # the numbers of a token are its channels
        self.num_positions = math.prod(sides)
        self.refine = Refine(channels, config, kernel) if config.c1 else nn.Module()
        self.register_buffer("unit", torch.ones(()))  # standard deviation of the features: scales what Refine sees
        self.unit: Tensor

    def forward(self, codes: Tensor, gate: Tensor | None = None) -> Tensor:
        """gate (B, 1, 1, 1): 0 for samples that are not refined; None: all are."""
        maps = self.unrefined(codes)
        if maps.is_cuda:
            maps = maps.contiguous(memory_format=torch.channels_last)
        output = maps
        if isinstance(self.refine, Refine):
            refined = self.refine(self._turned(maps) / self.unit)
            correction = self.unit * self._turned(refined)
            output = maps + (correction if gate is None else gate * correction)
        return F.leaky_relu(output, NEGATIVE_SLOPE) if torch.is_grad_enabled() else output.clamp(0, 1)

    def unrefined(self, codes: Tensor) -> Tensor:
        """Codes (B, P k) -> maps (B, c, h, w), which Refine corrects."""
        if self.axes is None:
            return (codes + self.mean).view(-1, *self.shape)
        if self.grid.num_blocks == 1:
            return torch.addmm(self.mean, codes, self.axes).view(-1, *self.shape)
        return self.grid.to_maps(codes, self.axes) + self.mean.view(self.shape)

    def _turned(self, maps: Tensor) -> Tensor:
        """Maps (B, tokens, 1, numbers) of a sequence -> (B, numbers, 1, tokens), and back; others as they are."""
        return maps.transpose(1, 3) if self.grid.is_sequence else maps


class GatedNet(nn.Module):
    """codes and gate (B, P k + 1) -> normalised features (B, c, h, w)"""

    def __init__(self, net: CompactNet):
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.net(inputs[:, :-1], inputs[:, -1:, None, None])
        return features


def stored_tensors(shape: Sequence[int], num_samples: int, config: CompactConfig) -> dict[str, Stored]:
    """The tensors of a file with this config."""
    num_values, num_axes = math.prod(shape), config.components
    stored = {**stored_range(shape), "unit": Stored((), torch.float32)}
    stored |= stored_matrix(CODES, num_samples, config.num_columns(shape), config.block_size)
    if num_axes:
        size = config.grid(shape).block_values
        stored |= {"mean": Stored((num_values,), torch.float16), "scale": Stored((num_axes,), torch.float16)}
        stored |= stored_matrix(AXES, size, num_axes, MAX_BLOCK, num_decoded=size * num_axes)
    if config.c1:
        with torch.device("meta"):
            refine = CompactNet(tuple(shape), config).refine
        stored |= stored_packed(NET, refine, rounding_plan(refine, config.bits))
    return stored


def working_numbers(shape: Sequence[int], config: CompactConfig) -> int:
    """Numbers that exist at once while a few samples are replayed: a block of codes, and the network's maps."""
    num_values, grid = math.prod(shape), config.grid(shape)
    num_columns = config.num_columns(shape)
    area = grid.shape[0] if grid.is_sequence else num_values // (shape[0] if shape else 1)  # positions of the network
    maps = map_numbers(num_values, config.c1 * area, num_columns)
    return block_numbers(config.block_size, num_columns) + maps + grid.dct_numbers


def network_multiplications(shape: Sequence[int], config: CompactConfig) -> int:
    """Of the network that refines one sample."""
    with torch.device("meta"):
        net = CompactNet(tuple(shape), config)
    return multiplications(net.refine, net.num_positions)


def zero_map(shape: tuple[int, ...], low: Tensor, high: Tensor) -> Tensor:
    """(values,): what the feature value 0 becomes when its channel's range [low, high] is scaled to [0, 1]."""
    zero = torch.where(high > low, -low / (high - low), 0.0).clamp(0, 1)
    return zero.repeat_interleave(math.prod(shape) // len(zero))


def read_config(settings: Mapping[str, Any], shape: Sequence[int]) -> CompactConfig:
    """The config in the header of a file with samples of this shape."""
    with reading_settings("krnet"):
        config = from_dict(CompactConfig, settings)
        check_grid(config, shape)
    return config


def read_network(shape: tuple[int, ...], config: CompactConfig, store: TensorStore) -> CompactNet:
    """The network in a file: refining weights, axes and mean."""
    num_values, k = math.prod(shape), config.components
    block_values = config.grid(shape).block_values
    with torch.device("meta"):
        net = CompactNet(shape, config)
    shapes = {name: tuple(p.shape) for name, p in net.refine.named_parameters()}
    weights = unpack(store, NET, shapes, rounding_plan(net.refine, config.bits)) if config.c1 else {}
    weights = {f"refine.{name}": value for name, value in weights.items()}
    if k:
        coded = load_axes(store, block_values, k)
        scale = store.tensor("scale", shape=(k,), dtype=torch.float16).float()
        weights["axes"] = decode_axes(coded, AXES_CODING, scale)  # (k, values of a block)
        weights["mean"] = store.tensor("mean", shape=(num_values,), dtype=torch.float16).float()
    else:
        low, high = read_range(store, net.shape)
        weights["mean"] = zero_map(net.shape, low, high)
    weights["unit"] = store.tensor("unit", shape=(), dtype=torch.float32)
    net.load_state_dict(weights, assign=True)
    return net


def read_codes(
    num_samples: int, shape: Sequence[int], config: CompactConfig, store: TensorStore, device: torch.device
) -> MatrixReader:
    """A reader of the codes in a file: ids (B,) -> codes (B, P k), or (B, values) without axes."""
    codes = CodedMatrix.load(store, CODES, num_samples, config.num_columns(shape), config.block_size)
    return MatrixReader(codes, config.coding, device)
