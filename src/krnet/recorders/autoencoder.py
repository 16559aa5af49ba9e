"""Autoencoder: a code for every sample, and the decoder that turns it into the sample's feature map.

    fitting   features --normalise--> Encoder -> code (B, code_width) --round to code_bits--> Decoder -> features
    file      decoder weights, codes of all samples; the encoder has done its work
    replay    ids -> codes -> Decoder -> normalised features (B, c, h, w) -> original scale

The rival in Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022): KRNet's decoder, an encoder that mirrors
it, 1,024 floats a sample. Few bits are ours: codes are rounded while they are learned, gradients pass straight through
(Bengio et al. 2013). All have one step; a code has a mean square of 1, so that the step says how many bits it takes at
most, and its numbers share them out by how much they vary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from krnet import lowbit, parallel
from krnet.budget import largest
from krnet.config import KERNEL, NetworkConfig, check_int, check_range, from_dict, unknown_setting
from krnet.decoder import Affine, BasicBlock, Decoder, DeconvModule, convolution, norm
from krnet.embedding import FCModule
from krnet.errors import InputError, NotARecordingError, OversizedRecordingError, SettingError
from krnet.layers import NEGATIVE_SLOPE, norm_act
from krnet.lowbit import Rounding, rounded, step_for
from krnet.quantize import RESTORE
from krnet.recorders._features import normalised
from krnet.recorders._fitting import NET, NetworkFit, NetworkReplayer, rounding_plan, run_fit
from krnet.recorders._numbers import MAX_BLOCK, CodedConfig, CodedNumbers, Numbers, Reader, encode, survey
from krnet.recorders.base import Content, Job, Recorder, TensorStore, overhead_bytes, register
from krnet.samples import Samples
from krnet.sizing import MAX_START_AREA, map_shape, preset_config, sizes_for
from krnet.training import Outcome

CODES = "codes"
FLOAT_BITS = 32
WEIGHT_TYPES: dict[float, torch.dtype] = {32: torch.float32, 16: torch.float16}
MAX_WIDTH = 2**16
PAPER_WIDTH = 1024
LEAST_WIDTH = 4  # by default: the decoder's first norm leaves no more than the sign of a single number
CHEAP_CODE_BITS, CHEAP_WEIGHT_BITS = 3, 4  # under a budget
MAX_STEPS = 56  # of `decoder_sizes`: about 13,000 channels
BLOCK_BYTES = 5  # that a block of codes takes beside its symbols
CODE_TABLE = 1000  # bytes of their entropy tables, at most; codes have more where they pay
ENCODED_BYTES = 64 << 20  # of the encoder's widest map, while the codes of all samples are found


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """What the file holds beside the sizes of the decoder."""

    code_width: int
    """Numbers in the code of a sample; 1,024 as in the paper, or as many as a sample has values if those are fewer."""
    code_bits: float = FLOAT_BITS
    """Bits of each, at most: 32 keeps floats, as the paper does; 1 to 8 are trained for, and entropy-coded."""
    weight_bits: float = FLOAT_BITS
    """Bits of a weight of the decoder, about: 32 or 16 keep floats; 1 to 8 are trained for, and entropy-coded."""
    block_size: int = 16
    """Samples whose codes of few bits are coded together: to read one is to read them all."""

    def __post_init__(self) -> None:
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


# ------------------------------------------------------------------ the network


class Encoder(nn.Module):
    """The decoder, mirrored: every layer the other way round, from the last to the first."""

    mean: Tensor
    std: Tensor

    def __init__(self, config: NetworkConfig, code_width: int, mean: Tensor, std: Tensor):
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
        self.fc0 = nn.Linear(config.d0, code_width, bias=False)

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
    def __init__(self, config: NetworkConfig, code: CodeConfig, mean: Tensor, std: Tensor):
        super().__init__()
        self.decoder = Decoder(config, code.code_width)
        self.decoder.output.start_from(mean, std)
        self.encoder = Encoder(config, code.code_width, mean, std)
        self.code, self.rounding = code, rounding_of(self.decoder, code.weight_bits)

    def codes(self, x: Tensor) -> Tensor:
        """Normalised features (B, c, h, w) -> codes (B, code_width), not yet rounded."""
        found = self.encoder(x)
        return found if self.code.step is None else unit_power(found)

    def forward(self, x: Tensor) -> Tensor:
        """The features as the file will give them back."""
        codes = self.codes(x)
        if self.code.step is not None:
            codes = codes + ((codes / self.code.step).round() * self.code.step - codes).detach()
        if not self.rounding:
            return self.decoder(codes)
        return functional_call(self.decoder, rounded(dict(self.decoder.named_parameters()), self.rounding), (codes,))


class AutoencoderFit(NetworkFit):
    net: Autoencoder

    def __init__(self, job: Job, config: NetworkConfig, code: CodeConfig):
        self.config, self.code = config, code
        stats = job.stats
        super().__init__(
            job, lambda: Autoencoder(config, code, stats.normalised_mean.float(), stats.normalised_std.float())
        )

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        return self.net(self._maps(target))

    def _maps(self, x: Tensor) -> Tensor:
        config = self.config
        return x if config.vector else x.view(len(x), config.channels, config.height, config.width)

    @torch.inference_mode()
    def codes(self) -> Tensor:
        """Of all samples, on the CPU: floats, or symbols."""
        step = self.code.step
        size = self.job.samples.num_samples, self.code.code_width
        found = torch.empty(size, dtype=torch.float32 if step is None else torch.int16)
        widest = max(math.prod(self.net.decoder.start_shape), self.config.c1 * self.config.height * self.config.width)
        with parallel.exact():
            for ids in torch.arange(len(found)).split(max(1, ENCODED_BYTES // (4 * widest))):
                codes = self.net.codes(self._maps(normalised(self.job, ids)))
                found[ids[0] : ids[-1] + 1] = codes if step is None else (codes / step).round()
        return found

    def content(self, outcome: Outcome) -> Content:
        codes = self.codes()
        if self.code.step is None:
            tensors = {CODES: codes}
        else:
            numbers = Numbers(lambda rows: codes[rows].float(), *codes.shape)
            tensors = encode(numbers, self.code.coding, survey(numbers, self.code.coding)).tensors(f"{CODES}.")
        return Content(
            tensors={
                **tensors,
                **pack(self.net.decoder, self.code.weight_bits),
                "low": self.job.stats.low,
                "high": self.job.stats.high,
            },
            settings=settings_of(self.config, self.code),
            iterations=outcome.iterations,
            seconds=outcome.seconds,
            stopped_by=outcome.reason,
        )


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


def packed_bytes(decoder: Decoder, bits: float) -> tuple[int, int]:
    """Bytes that `pack` makes, at most, and in how many tensors."""
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    if bits in WEIGHT_TYPES:
        return sum(map(math.prod, shapes.values())) * int(bits) // 8, len(shapes)
    return lowbit.packed_bytes(shapes, rounding_of(decoder, bits)), lowbit.NUM_TENSORS


def decoder_sizes(shape: tuple[int, ...], steps: int, overrides: Mapping[str, Any]) -> NetworkConfig:
    """A family of decoders, each a step wider than the one before."""
    channels, height, width = map_shape(shape)
    # By eight channels, then by an eighth.
    c0 = 8 * (steps + 1) if steps < 16 else 8 * round(16 * 1.125 ** (steps - 15))
    sizes: dict[str, Any] = {
        "channels": channels,
        "height": height,
        "width": width,
        "vector": len(shape) <= 1,
        "d0": c0 if len(shape) <= 1 else min(4 * c0, 1536),
        "c0": c0,
        "c1": min(max(c0, 16), 64),
        "stride": next((s for s in range(1, KERNEL) if -(-height // s) * -(-width // s) <= MAX_START_AREA), KERNEL),
    }
    return from_dict(NetworkConfig, {**sizes, **overrides})


GEOMETRY = frozenset({"channels", "height", "width", "vector"})
# Of NetworkConfig: what the decoder goes by.
NETWORK_NAMES = GEOMETRY | {"d0", "c0", "c1", "stride", "conv_before", "conv_after", "last_norm"}
CODE_NAMES = frozenset(f.name for f in fields(CodeConfig))


def most_useful(shape: tuple[int, ...]) -> int:
    """Numbers of a code that is as wide as the sample it stands for."""
    return min(max(LEAST_WIDTH, math.prod(shape)), MAX_WIDTH)


def settings_of(config: NetworkConfig, code: CodeConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name in NETWORK_NAMES} | asdict(code)


def stored_codes(
    store: TensorStore, code: CodeConfig, num_samples: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """ids (n,) on the CPU -> codes (n, code_width) on the device."""
    width = code.code_width
    step = code.step
    if step is None:
        floats = store.tensor(CODES, shape=(num_samples, width), dtype=torch.float32)
        return lambda ids: floats[ids].to(device)
    coded = CodedNumbers.load(store, f"{CODES}.", num_samples, width, code.block_size)
    reader = Reader(coded, code.coding, device)
    return lambda ids: reader.read(ids) * step


@register
class AutoencoderRecorder(Recorder):
    name = "autoencoder"
    takes_head = True
    # The geometry follows from the features and is not the caller's to set.
    setting_names = (NETWORK_NAMES | CODE_NAMES) - GEOMETRY

    def config(self, job: Job) -> tuple[NetworkConfig, CodeConfig]:
        shape = job.source.shape
        network = {name: value for name, value in job.settings.items() if name not in CODE_NAMES}
        if job.preset is not None:
            config = preset_config(shape, job.preset, **network)
        else:
            # Without the last norm Adam's steps, as large as the paper's, push the output below zero.
            network = {"last_norm": job.fit.schedule == "paper", **network}
            config = sizes_for(shape, job.samples.class_counts(), **network)
        given = {name: value for name, value in job.settings.items() if name in CODE_NAMES}
        code = from_dict(CodeConfig, {"code_width": min(PAPER_WIDTH, most_useful(shape)), **given})
        return config, code

    def fit(self, job: Job) -> Content:
        if job.start is not None:
            raise InputError(
                "start is given, and recorder autoencoder learns every code anew; leave start out, or take krnet"
            )
        config, code = self.config(job)
        return run_fit(self, AutoencoderFit(job, config, code), settings_of(config, code))

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """Half of the bytes for codes of few bits, the other half for as wide a decoder as they pay for.

        3 bits, the even split and d0 = 4 c0 are reasoned, not measured.
        """
        shape, given = job.source.shape, dict(job.settings)
        code: dict[str, Any] = {"code_bits": CHEAP_CODE_BITS, "weight_bits": CHEAP_WEIGHT_BITS}
        code |= {name: value for name, value in given.items() if name in CODE_NAMES}
        network = {"last_norm": job.fit.schedule == "paper"}
        network |= {name: value for name, value in given.items() if name not in CODE_NAMES}

        def size(config: NetworkConfig, width: int) -> int:
            return self.size_bytes(job, config, from_dict(CodeConfig, code | {"code_width": width}))

        def widest(config: NetworkConfig, most: float) -> int:
            """The widest code with which the file has at most so many bytes."""
            if "code_width" in code:
                return int(code["code_width"])
            return largest(lambda width: size(config, width) <= most, LEAST_WIDTH, most_useful(shape))

        smallest = decoder_sizes(shape, 0, network)
        width = widest(smallest, (size(smallest, LEAST_WIDTH) + budget) / 2)
        steps = largest(lambda steps: size(decoder_sizes(shape, steps, network), width) <= budget, 0, MAX_STEPS)
        config = decoder_sizes(shape, steps, network)
        found = from_dict(CodeConfig, code | {"code_width": widest(config, budget)})
        return {name: value for name, value in settings_of(config, found).items() if name in self.setting_names}

    def size_bytes(self, job: Job, config: NetworkConfig, code: CodeConfig) -> int:
        """Most that a file of these settings takes."""
        num_samples, width = job.samples.num_samples, code.code_width
        with torch.device("meta"):
            weights, num_tensors = packed_bytes(Decoder(config, width), code.weight_bits)
        if code.step is None:
            codes, num_tensors = 4 * width * num_samples, num_tensors + 1
        else:
            num_blocks = -(-num_samples // code.block_size)
            codes = math.ceil(num_samples * width * lowbit.coded_bits(code.step) / 8)
            codes += BLOCK_BYTES * num_blocks + width + CODE_TABLE
            num_tensors += 7
        edges = 8 * config.channels
        return codes + weights + edges + overhead_bytes(job, num_tensors + 2, settings_of(config, code))

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> NetworkReplayer:
        """Sizes are checked against the tensors in the file before anything is allocated for them."""
        try:
            code = from_dict(CodeConfig, {k: v for k, v in settings.items() if k in CODE_NAMES})
            rest = {k: v for k, v in settings.items() if k not in CODE_NAMES}
            for name in rest:
                if name not in NETWORK_NAMES:
                    raise unknown_setting(name, NETWORK_NAMES)
            config = from_dict(NetworkConfig, rest)
            geometry = (config.channels, config.height, config.width), config.vector
            if geometry != (map_shape(samples.shape), len(samples.shape) <= 1):
                raise SettingError(f"a network for other features than the file's {samples.shape}")
        except (InputError, KeyError, TypeError) as error:
            raise NotARecordingError(f"settings of recorder autoencoder refused: {error}. {RESTORE}") from error
        try:
            with torch.device("meta"):
                decoder = Decoder(config, code.code_width)
        except (RuntimeError, TypeError) as error:  # sizes whose product overflows
            raise OversizedRecordingError(f"a network of no possible size: {error}. Record again") from error
        decoder.load_state_dict(unpack(store, decoder, code.weight_bits), assign=True)
        if device.type == "cpu":  # in which depthwise convolutions are quicker there
            decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        low, high = (store.tensor(name, shape=(config.channels,), dtype=torch.float32) for name in ("low", "high"))
        codes = stored_codes(store, code, samples.num_samples, device)
        widest = math.prod(decoder.start_shape)
        return NetworkReplayer(decoder, codes, widest, samples, low, high, device)
