"""Code and decoder with which an autoencoder makes the best of a budget; nothing is fitted to find them.

    budget -> bits -> two fifths for codes, the rest for a decoder -> code as wide as what is left -> settings

Bits are the usual ones, and it is the sizes that follow the budget: a wider decoder gains more than finer numbers, and
most where its first layer is much wider than the code (docs/choices.md). Only where the smallest network is too large
are there fewer bits, of weights before codes; only where the largest leaves room are there more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from krnet.coding.search import largest_fitting
from krnet.config import from_dict
from krnet.nn.paper_config import KERNEL, DecoderConfig
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import MAX_PARAMETERS, MAX_START_AREA, map_shape
from krnet.recorders.autoencoder.network import CODE_NAMES, MAX_WIDTH, AutoencoderConfig, stored_tensors
from krnet.recorders.base import Job, file_bytes, overhead_bytes

LEAST_WIDTH = 4  # by default: the decoder's first norm leaves no more than the sign of a single number
# Of codes and weights, the fewest first. Codes as floats, as wide as a map, would take as much as the maps.
FEWER_BITS = [(2 + n / 4, 2.0) for n in range(4)] + [(3.0, 2 + n / 4) for n in range(8)]
MORE_BITS = [(3 + n / 4, min(4 + n / 4, 8.0)) for n in range(21)] + [(8.0, 16.0)]
BITS, USUAL = FEWER_BITS + MORE_BITS, len(FEWER_BITS)
EVEN_STEPS = 64  # of `decoder_sizes`, by as many values each
MAX_STEPS = 100  # far more than memory would hold
EVEN_WIDTH = 256  # numbers of a code from which on it has a multiple of eight: what a GPU multiplies quickly
CODE_SHARE = 0.38  # of a budget: what is left over by the decoder, which grows in steps, comes to them, too


def most_useful(shape: tuple[int, ...]) -> int:
    """Numbers of a code that is as wide as the sample it stands for."""
    return min(max(LEAST_WIDTH, math.prod(shape)), MAX_WIDTH)


def decoder_sizes(shape: tuple[int, ...], steps: int, overrides: Mapping[str, Any]) -> DecoderConfig:
    """A family of decoders, each a step wider than the one before: (B, d0) -> (B, c0, h0, w0) -> (B, c1, h, w)."""
    channels, height, width = map_shape(shape)
    vector = len(shape) <= 1
    # By 32 values, then by an eighth. Of a small decoder c0 is a quarter of d0, of a large one a twelfth.
    first = 32 * (steps + 1) if steps < EVEN_STEPS else 32 * EVEN_STEPS * 1.125 ** (steps - EVEN_STEPS + 1)
    c0 = first / 4 if vector else max(2 * first**0.5, first / 12)
    c0 = 8 * max(1, round(c0 / 8)) if c0 < 64 else 16 * round(c0 / 16)  # in eights for each of a norm's two groups
    sizes: dict[str, Any] = {
        "channels": channels,
        "height": height,
        "width": width,
        "vector": vector,
        "d0": c0 if vector else 32 * round(first / 32),
        "c0": c0,
        "c1": min(16 * max(1, round(1.5 * c0 / 16)), 256),
        "conv_before": "full",
        "stride": next((s for s in range(1, KERNEL) if -(-height // s) * -(-width // s) <= MAX_START_AREA), KERNEL),
    }
    return from_dict(DecoderConfig, {**sizes, **overrides})


def num_weights(config: DecoderConfig, code_width: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config, code_width).parameters())


def size_bytes(job: Job, config: AutoencoderConfig) -> int:
    """Most that a file of these settings takes."""
    return file_bytes(job, stored_tensors(job.samples.num_samples, config), asdict(config))


def for_budget(job: Job, budget: int) -> dict[str, Any]:
    """Settings of code and decoder."""
    shape = job.source.shape
    given = {name: value for name, value in job.settings.items() if name in CODE_NAMES}
    network = {"last_norm": job.fit.schedule == "paper"}
    network |= {name: value for name, value in job.settings.items() if name not in CODE_NAMES}
    least, most = (given["code_width"],) * 2 if "code_width" in given else (LEAST_WIDTH, most_useful(shape))

    def decoder(steps: int) -> DecoderConfig:
        return decoder_sizes(shape, steps, network)

    def config(bits: int, steps: int, width: int) -> AutoencoderConfig:
        code_bits, weight_bits = BITS[bits]
        code = {"code_bits": code_bits, "weight_bits": weight_bits, **given, "code_width": width}
        return from_dict(AutoencoderConfig, asdict(decoder(steps)) | code)

    def size(bits: int, steps: int, width: int) -> int:
        return size_bytes(job, config(bits, steps, width))

    def within(steps: int, width: int) -> int:
        """As much of a code's width as the first layer has: it throws away what it is too narrow for."""
        return min(width, max(least, decoder(steps).d0))

    # What takes more than the features as they are is of no use, and a decoder of more weights than krnet may have
    # by default is more than a machine has memory for.
    budget = min(budget, 4 * job.samples.num_samples * math.prod(shape) + overhead_bytes(job, 1, {}))
    most_steps = largest_fitting(
        lambda steps: num_weights(decoder(steps), within(steps, most)) <= MAX_PARAMETERS, 0, MAX_STEPS
    )
    limit = within(most_steps, most)

    def affordable(bits: int) -> bool:
        return (size(bits, 0, least) if bits <= USUAL else size(bits, most_steps, limit)) <= budget

    bits = largest_fitting(affordable, 0, len(BITS) - 1)

    def widest(steps: int, most_bytes: float) -> int:
        """The widest code with which the file has at most so many bytes."""
        width = largest_fitting(lambda width: size(bits, steps, width) <= most_bytes, least, limit)
        return width if width < EVEN_WIDTH or width == limit else width // 8 * 8

    smallest = size(bits, 0, least)
    width = widest(0, smallest + CODE_SHARE * (budget - smallest))
    steps = largest_fitting(lambda steps: size(bits, steps, within(steps, width)) <= budget, 0, most_steps)
    return asdict(config(bits, steps, widest(steps, budget)))
