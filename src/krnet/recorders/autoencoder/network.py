"""The autoencoder's network: an encoder that mirrors KRNet's decoder, rounded codes, and the weights in a file.

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
from krnet.recorders.basis import stored_matrix
from krnet.recorders.network_sizes import NET, stored_packed, stored_weights
from krnet.recorders.ranges import stored_range

FLOAT_BITS = 32
WEIGHT_TYPES: dict[float, torch.dtype] = {32: torch.float32, 16: torch.float16}
MAX_CODE_WIDTH = 2**16
CODES = "codes"  # tensor name, or prefix of tensor names
BLOCK_OVERHEAD_BYTES = 5  # bytes that a block of codes takes beside its symbols
# Bytes of the codes' entropy tables. There may be more tables, but only if they save more bytes than they take.
MAX_TABLE_BYTES = 1000


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(DecoderConfig):
    """Sizes and precision of the decoder and of the codes that it reads."""

    code_width: int
    """Numbers in a sample's code; by default 1,024 as in the paper, or one per value of a sample if it has fewer."""
    code_bits: float = FLOAT_BITS
    """Bits of each number of a code, at most: 32 keeps floats, as the paper does; for 1 to 8 the codes are rounded
    while training, and entropy-coded."""
    weight_bits: float = FLOAT_BITS
    """Bits of each weight of the decoder, about: 32 or 16 keep floats; for 1 to 8 the weights are rounded while
    training, and entropy-coded."""
    block_size: int = 16
    """Samples whose codes are entropy-coded together: reading one decodes its whole block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("code_width", self.code_width, 1, MAX_CODE_WIDTH)
        for name, floats in (("code_bits", (FLOAT_BITS,)), ("weight_bits", tuple(WEIGHT_TYPES))):
            if getattr(self, name) not in floats:
                check_range(name, getattr(self, name), 1, 8)
        check_int("block_size", self.block_size, 1, MAX_BLOCK)

    @property
    def step(self) -> float | None:
        """Quantisation step of the codes, whose mean square is 1; None if they are floats."""
        return None if self.code_bits == FLOAT_BITS else step_for(self.code_bits)

    @property
    def coding(self) -> CodedConfig:
        """Entropy coding of the symbols, which are whole numbers already."""
        return CodedConfig(step=1.0, dead_zone=0.5, centroid=0.0, block_size=self.block_size)


CODE_NAMES = frozenset(f.name for f in fields(AutoencoderConfig)) - {f.name for f in fields(DecoderConfig)}


class Encoder(nn.Module):
    """The decoder mirrored: its layers from the last to the first, each with input and output exchanged."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: AutoencoderConfig, mean: Tensor, std: Tensor):
        """mean, std (channels,) of the normalised features."""
        super().__init__()
        c0, c1, c = config.c0, config.c1, config.channels
        shape = (c,) if config.vector else (c, 1, 1)
        self.register_buffer("mean", mean.view(shape), persistent=False)
        self.register_buffer("std", torch.where(std > 0, std, 1.0).view(shape), persistent=False)
        self.vector = config.vector
        d1 = c0 * math.prod(config.start_size)
        width = c0 if config.vector else c1
        # As in the decoder: without a norm, samples keep their own amplitudes.
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
    """Scale each code (B, width) to a mean square of 1, so that the quantisation step determines the bits."""
    codes = codes.float()
    return codes * (codes.square().mean(1, keepdim=True) + 1e-12).rsqrt()


def rounding_of(decoder: Decoder, bits: float) -> dict[str, Rounding]:
    """How each weight is rounded; empty if all weights are floats."""
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
        codes, step = self.encoder(x), self.config.step
        if step is None:
            return codes
        # The largest that an entropy table has a symbol for. One number of a long code may hold nearly all its power.
        limit = (MAX_ALPHABET // 2 - 1) * step
        return unit_power(codes).clamp(-limit, limit)

    def forward(self, x: Tensor) -> Tensor:
        """The features (B, c, h, w) as the file will replay them; gradients pass straight through the rounding."""
        codes = self.codes(x)
        if self.config.step is not None:
            codes = codes + ((codes / self.config.step).round() * self.config.step - codes).detach()
        if not self.rounding:
            return self.decoder(codes)
        return functional_call(self.decoder, rounded(dict(self.decoder.named_parameters()), self.rounding), (codes,))


# ------------------------------------------------------------------ the file


def pack(decoder: Decoder, bits: float) -> dict[str, Tensor]:
    """The decoder's weights as tensors of the file."""
    weights = {name: p.detach().cpu() for name, p in decoder.named_parameters()}
    if dtype := WEIGHT_TYPES.get(bits):
        return {f"{NET}{name}": p.to(dtype) for name, p in weights.items()}
    return {f"{NET}{name}": p for name, p in lowbit.pack(weights, rounding_of(decoder, bits)).items()}


def unpack(store: TensorStore, decoder: Decoder, bits: float) -> dict[str, Tensor]:
    """The weights, from a file, of a decoder that is still on the meta device."""
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
    return {**stored_range((config.channels,)), **weights, **stored_codes(num_samples, config)}


def stored_codes(num_samples: int, config: AutoencoderConfig) -> dict[str, Stored]:
    width = config.code_width
    if config.step is None:
        return {CODES: Stored((num_samples, width), torch.float32)}
    num_blocks = -(-num_samples // config.block_size)
    max_bytes = math.ceil(num_samples * width * coded_bits(config.step) / 8)
    max_bytes += BLOCK_OVERHEAD_BYTES * num_blocks + width + MAX_TABLE_BYTES
    found = stored_matrix(f"{CODES}.", num_samples, width, config.block_size, most_bytes=max_bytes)
    # The stream's bound covers all of these tensors: without a shape, the others count for nothing.
    return {name: replace(tensor, shape=None) for name, tensor in found.items()}
