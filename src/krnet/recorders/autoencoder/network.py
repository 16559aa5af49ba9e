"""The network of the autoencoder: its code, the encoder that mirrors KRNet's decoder, and weights as a file holds them.

features (B, c, h, w) -> Encoder -> codes (B, code_width) -> rounded -> Decoder -> features
Decoder <-> pack, unpack <-> the tensors of a file
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from krnet.coding import weights as lowbit
from krnet.coding.entropy import MAX_ALPHABET
from krnet.coding.matrix import MAX_BLOCK, CodedConfig
from krnet.coding.weights import Rounding, coded_bits, rounded, rounding_plan, step_for
from krnet.config import check_int, check_range
from krnet.io.archive import TensorStore
from krnet.nn.layers import NEGATIVE_SLOPE, norm_act
from krnet.nn.paper_config import DecoderConfig
from krnet.nn.paper_net import Affine, BasicBlock, Decoder, DeconvModule, FCModule, convolution, norm
from krnet.recorders.base import Stored
from krnet.recorders.basis import stored_edges, stored_matrix
from krnet.recorders.fit import NET, stored_packed, stored_weights

FLOAT_BITS = 32
WEIGHT_TYPES: dict[float, torch.dtype] = {32: torch.float32, 16: torch.float16}
MAX_WIDTH = 2**16
CODES = "codes"
BLOCK_BYTES = 5  # that a block of codes takes beside its symbols
CODE_TABLE = 1000  # bytes of their entropy tables, at most; codes have more where they pay


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(DecoderConfig):
    """The decoder, and the codes that it reads."""

    code_width: int
    """Numbers in the code of a sample; 1,024 as in the paper, or as many as a sample has values if those are fewer."""
    code_bits: float = FLOAT_BITS
    """Bits of each, at most: 32 keeps floats, as the paper does; 1 to 8 are trained for, and entropy-coded."""
    weight_bits: float = FLOAT_BITS
    """Bits of a weight of the decoder, about: 32 or 16 keep floats; 1 to 8 are trained for, and entropy-coded."""
    block_size: int = 16
    """Samples whose codes of few bits are coded together: to read one is to read them all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("code_width", self.code_width, 1, MAX_WIDTH)
        for name, floats in (("code_bits", (FLOAT_BITS,)), ("weight_bits", tuple(WEIGHT_TYPES))):
            if getattr(self, name) not in floats:
                check_range(name, getattr(self, name), 1, 8)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)

    @property
    def step(self) -> float | None:
        """Of codes, which have a mean square of 1; None where they are floats."""
        return None if self.code_bits == FLOAT_BITS else step_for(self.code_bits)

    @property
    def coding(self) -> CodedConfig:
        """How symbols, which are whole numbers, are coded: as they are."""
        return CodedConfig(step=1.0, dead_zone=0.5, centroid=0.0, block_size=self.block_size)


CODE_NAMES = frozenset(f.name for f in fields(AutoencoderConfig)) - {f.name for f in fields(DecoderConfig)}


class Encoder(nn.Module):
    """The decoder, mirrored: every layer the other way round, from the last to the first."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: AutoencoderConfig, mean: Tensor, std: Tensor):
        """mean, std (channels,): of the normalised features."""
        super().__init__()
        c0, c1, c = config.c0, config.c1, config.channels
        shape = (c,) if config.vector else (c, 1, 1)
        self.register_buffer("mean", mean.view(shape), persistent=False)
        self.register_buffer("std", torch.where(std > 0, std, 1.0).view(shape), persistent=False)
        self.vector = config.vector
        d1 = c0 * math.prod(config.start_size)
        width = c0 if config.vector else c1
        # As in the decoder: without a norm each sample keeps its amplitude.
        self.input_norm = norm(width) if config.last_norm else Affine(width)
        if config.vector:
            self.input: nn.Module = nn.Linear(c, c0, bias=False)
            self.after: nn.Module = nn.Identity()
            self.conv: nn.Module = nn.Identity()
            self.before: nn.Module = nn.Identity()
        else:
            before, after = config.conv_before, config.conv_after
            self.input = convolution(c, c1, after)
            self.after = nn.Sequential(*[BasicBlock(c1, after) for _ in range(2)])
            self.conv = DeconvModule(nn.Conv2d(c1, c0, 5, config.stride, padding=2, bias=False), norm(c0))
            self.before = nn.Sequential(*[BasicBlock(c0, before) for _ in range(4)])
        self.fc1 = FCModule(d1, config.d0)
        self.fc0 = nn.Linear(config.d0, config.code_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x normalised (B, c, h, w) -> codes (B, code_width)"""
        x = (x - self.mean) / self.std
        x = self.input(x if self.vector else x.contiguous(memory_format=torch.channels_last))
        if isinstance(self.input_norm, nn.GroupNorm):
            x = norm_act(x, self.input_norm)
        else:
            x = F.leaky_relu(self.input_norm(x), NEGATIVE_SLOPE).to(x.dtype)
        return self.fc0(self.fc1(self.before(self.conv(self.after(x))).flatten(1)))


def unit_power(codes: Tensor) -> Tensor:
    """Each code (B, width) scaled to a mean square of 1: what makes a step mean a number of bits."""
    codes = codes.float()
    return codes * (codes.square().mean(1, keepdim=True) + 1e-12).rsqrt()


def rounding_of(decoder: Decoder, bits: float) -> dict[str, Rounding]:
    """Which weights are kept in how many bits; none where all are floats."""
    return rounding_plan(decoder, None if bits in WEIGHT_TYPES else bits)


class Autoencoder(nn.Module):
    def __init__(self, config: AutoencoderConfig, mean: Tensor, std: Tensor):
        super().__init__()
        self.decoder = Decoder(config, config.code_width)
        self.decoder.output.start_from(mean, std)
        self.encoder = Encoder(config, mean, std)
        self.config, self.rounding = config, rounding_of(self.decoder, config.weight_bits)

    def codes(self, x: Tensor) -> Tensor:
        """Normalised features (B, c, h, w) -> codes (B, code_width), not yet rounded."""
        found, step = self.encoder(x), self.config.step
        if step is None:
            return found
        most = (MAX_ALPHABET // 2 - 1) * step  # that the coder's tables take: a long code may lie in one number
        return unit_power(found).clamp(-most, most)

    def forward(self, x: Tensor) -> Tensor:
        """The features as the file will give them back."""
        codes = self.codes(x)
        if self.config.step is not None:
            codes = codes + ((codes / self.config.step).round() * self.config.step - codes).detach()
        if not self.rounding:
            return self.decoder(codes)
        return functional_call(self.decoder, rounded(dict(self.decoder.named_parameters()), self.rounding), (codes,))


# ------------------------------------------------------------------ the file


def pack(decoder: Decoder, bits: float) -> dict[str, Tensor]:
    """The decoder's weights as the file holds them."""
    weights = {name: p.detach().cpu() for name, p in decoder.named_parameters()}
    if dtype := WEIGHT_TYPES.get(bits):
        return {f"{NET}{name}": p.to(dtype) for name, p in weights.items()}
    return {f"{NET}{name}": p for name, p in lowbit.pack(weights, rounding_of(decoder, bits)).items()}


def unpack(store: TensorStore, decoder: Decoder, bits: float) -> dict[str, Tensor]:
    """Weights for a decoder that has none yet (on the device meta)."""
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    if dtype := WEIGHT_TYPES.get(bits):
        return {n: store.tensor(f"{NET}{n}", shape=shape, dtype=dtype).float() for n, shape in shapes.items()}
    return lowbit.unpack(store, NET, shapes, rounding_of(decoder, bits))


def stored_tensors(num_samples: int, config: AutoencoderConfig) -> dict[str, Stored]:
    with torch.device("meta"):
        decoder = Decoder(config, config.code_width)
    dtype = WEIGHT_TYPES.get(config.weight_bits)
    weights = (
        stored_weights(NET, decoder, dtype)
        if dtype
        else stored_packed(NET, decoder, rounding_of(decoder, config.weight_bits))
    )
    return {**stored_edges((config.channels,)), **weights, **stored_codes(num_samples, config)}


def stored_codes(num_samples: int, config: AutoencoderConfig) -> dict[str, Stored]:
    width = config.code_width
    if config.step is None:
        return {CODES: Stored((num_samples, width), torch.float32)}
    num_blocks = -(-num_samples // config.block_size)
    most = math.ceil(num_samples * width * coded_bits(config.step) / 8)
    most += BLOCK_BYTES * num_blocks + width + CODE_TABLE
    found = stored_matrix(f"{CODES}.", num_samples, width, config.block_size, most_bytes=most)
    # The bound covers all of them.
    return {name: replace(tensor, shape=None) for name, tensor in found.items()}
