"""Choose the sizes of code and decoder for a budget, by their bytes alone: nothing is fitted.

    budget -> bits -> decoder that leaves about two fifths to the codes -> widest code that fits -> settings

The bits per number stay at 3 (codes) and 4 (weights), and the sizes follow the budget: a wider decoder gains more than
finer numbers, most of all when its first layer is much wider than the code (notes/choices.md). Bits are lowered only
where the smallest network is too large, first those of weights, then those of codes. They are raised only where the
largest network does not fill the budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from krnet.coding.search import largest_fitting
from krnet.config import from_dict
from krnet.nn.paper_config import DecoderConfig
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import MAX_PARAMETERS, geometry, map_shape, start_stride
from krnet.recorders.autoencoder.network import CODE_NAMES, MAX_CODE_WIDTH, AutoencoderConfig, stored_tensors
from krnet.recorders.base import Job
from krnet.recorders.sizes import file_bytes, overhead_bytes

MIN_CODE_WIDTH = 4  # by default: of a single number the decoder's first norm keeps only the sign
# (code_bits, weight_bits), the fewest first. Float codes as wide as a map would take as many bytes as the maps.
LOW_BITS = [(2 + n / 4, 2.0) for n in range(4)] + [(3.0, 2 + n / 4) for n in range(8)]
USUAL_AND_HIGH_BITS = [(3 + n / 4, min(4 + n / 4, 8.0)) for n in range(21)] + [(8.0, 16.0)]
BITS, USUAL_BITS = LOW_BITS + USUAL_AND_HIGH_BITS, len(LOW_BITS)  # USUAL_BITS is an index into BITS
NUM_LINEAR_STEPS = 64  # decoders of `decoder_sizes` that each add 32 values to d0; later ones add an eighth
MAX_STEPS = 100  # far more than memory would hold
MIN_ALIGNED_WIDTH = 256  # codes this wide get a multiple of 8 numbers, which a GPU multiplies quickly
CODE_SHARE = 0.38  # share of a budget for codes; they also get the bytes that the decoder's coarse sizes leave over


def max_useful_width(shape: tuple[int, ...]) -> int:
    """The number of values in a sample: a wider code would gain nothing."""
    return min(max(MIN_CODE_WIDTH, math.prod(shape)), MAX_CODE_WIDTH)


def decoder_sizes(shape: tuple[int, ...], steps: int, overrides: Mapping[str, Any]) -> DecoderConfig:
    """Decoder number `steps` of a family in which each is wider than the one before.

    (B, d0) -> (B, c0, h0, w0) -> (B, c1, h, w)
    """
    _, height, width = map_shape(shape)
    vector = len(shape) <= 1
    linear = NUM_LINEAR_STEPS
    d0 = 32 * (steps + 1) if steps < linear else 32 * linear * 1.125 ** (steps - linear + 1)
    # For maps, c0 falls from a third of d0 in the smallest decoder to a twelfth in large ones.
    c0 = d0 / 4 if vector else max(2 * d0**0.5, d0 / 12)
    # Large ones are multiples of 16: a multiple of 8 for each of the norm's two groups.
    c0 = 8 * max(1, round(c0 / 8)) if c0 < 64 else 16 * round(c0 / 16)
    sizes: dict[str, Any] = {
        **geometry(shape),
        "d0": c0 if vector else 32 * round(d0 / 32),
        "c0": c0,
        "c1": min(16 * max(1, round(1.5 * c0 / 16)), 256),
        "conv_before": "full",
        "stride": start_stride(height, width),
    }
    return from_dict(DecoderConfig, {**sizes, **overrides})


def num_weights(config: DecoderConfig, code_width: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(config, code_width).parameters())


def size_bytes(job: Job, config: AutoencoderConfig) -> int:
    """Upper bound of the size of a file with these settings."""
    return file_bytes(job, stored_tensors(job.samples.num_samples, config), asdict(config))


def for_budget(job: Job, budget: int) -> dict[str, Any]:
    """Settings of the code and decoder that fill the budget; the smallest ones where it is too small."""
    shape = job.source.shape
    given = {name: value for name, value in job.settings.items() if name in CODE_NAMES}
    network = {"last_norm": job.fit.schedule == "paper"}
    network |= {name: value for name, value in job.settings.items() if name not in CODE_NAMES}
    min_width, max_width = (
        (given["code_width"],) * 2 if "code_width" in given else (MIN_CODE_WIDTH, max_useful_width(shape))
    )

    def decoder(steps: int) -> DecoderConfig:
        return decoder_sizes(shape, steps, network)

    def config(bits: int, steps: int, width: int) -> AutoencoderConfig:
        code_bits, weight_bits = BITS[bits]
        code = {"code_bits": code_bits, "weight_bits": weight_bits, **given, "code_width": width}
        return from_dict(AutoencoderConfig, asdict(decoder(steps)) | code)

    def size(bits: int, steps: int, width: int) -> int:
        return size_bytes(job, config(bits, steps, width))

    def cap_width(steps: int, width: int) -> int:
        """A code is at most as wide as the decoder's first layer, which would lose the rest."""
        return min(width, max(min_width, decoder(steps).d0))

    # A file larger than the features as float32 is of no use. MAX_PARAMETERS keeps the decoder within memory.
    budget = min(budget, 4 * job.samples.num_samples * math.prod(shape) + overhead_bytes(job, 1, {}))
    max_steps = largest_fitting(
        lambda steps: num_weights(decoder(steps), cap_width(steps, max_width)) <= MAX_PARAMETERS, 0, MAX_STEPS
    )
    max_width = cap_width(max_steps, max_width)

    def affordable(bits: int) -> bool:
        """Up to the usual bits the smallest network has to fit, beyond them the largest."""
        return (size(bits, 0, min_width) if bits <= USUAL_BITS else size(bits, max_steps, max_width)) <= budget

    bits = largest_fitting(affordable, 0, len(BITS) - 1)

    def widest_code(steps: int, max_bytes: float) -> int:
        """The width of the widest code with which the file has at most `max_bytes`."""
        width = largest_fitting(lambda width: size(bits, steps, width) <= max_bytes, min_width, max_width)
        return width if width < MIN_ALIGNED_WIDTH or width == max_width else width // 8 * 8

    smallest = size(bits, 0, min_width)
    width = widest_code(0, smallest + CODE_SHARE * (budget - smallest))
    steps = largest_fitting(lambda steps: size(bits, steps, cap_width(steps, width)) <= budget, 0, max_steps)
    return asdict(config(bits, steps, widest_code(steps, budget)))
