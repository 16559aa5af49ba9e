"""Choose the sizes of a KRNet for given features, and count its weights without building it.

shape, class counts -> sizes_for        -> NetworkConfig
shape, preset name  -> preset_config    -> NetworkConfig
NetworkConfig       -> count_parameters -> number of stored weights
"""

from __future__ import annotations

import math
from typing import Any

import torch

from krnet.config import check_choice, from_dict
from krnet.nn.paper_config import KERNEL, PRESETS, NetworkConfig
from krnet.nn.paper_net import BatchedIDEmbedding, Decoder

MAX_START_AREA = 100  # values per channel before the deconvolution; its stride brings larger maps to full size
MAX_PARAMETERS = 100_000_000  # weights that default_parameters never exceeds


def map_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width) of a sample of any shape: axis 0, the product of the middle axes, the last axis."""
    if len(shape) <= 1:
        return shape[0] if shape else 1, 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def geometry(shape: tuple[int, ...]) -> dict[str, Any]:
    """The settings of a decoder that follow from the shape of a sample: GEOMETRY."""
    channels, height, width = map_shape(shape)
    return {"channels": channels, "height": height, "width": width, "vector": len(shape) <= 1}


def start_stride(height: int, width: int) -> int:
    """The least stride of the deconvolution that makes a map of this size from one of MAX_START_AREA positions."""
    return next((s for s in range(1, KERNEL) if -(-height // s) * -(-width // s) <= MAX_START_AREA), KERNEL)


def count_parameters(config: NetworkConfig, num_groups: int = 0) -> int:
    """Number of weights of decoder and embedding, with the static and dynamic vectors of `num_groups` groups."""
    with torch.device("meta"):
        modules = Decoder(config, config.input_size), BatchedIDEmbedding(num_groups, config.group_size)
    return sum(p.numel() for module in modules for p in module.parameters())


def preset_config(shape: tuple[int, ...], preset: str, **overrides: object) -> NetworkConfig:
    check_choice("preset", preset, PRESETS)
    return from_dict(NetworkConfig, geometry(shape) | PRESETS[preset] | overrides)


def sizes_for(
    shape: tuple[int, ...], class_counts: list[int], num_parameters: int | None = None, **overrides: object
) -> NetworkConfig:
    """The widest decoder within `num_parameters` weights (by default, default_parameters of the features).

    At most an eighth of the weights goes to the embedding and half to the layers after the deconvolution. The rest,
    nearly all of a large network, is the second FC layer, which tells the samples apart.
    """
    channels, height, width = map_shape(shape)
    budget = num_parameters or default_parameters(sum(class_counts) * math.prod(shape))
    # The embedding's two FC layers, and the part of the decoder that reads them, have about 4 H^2 weights for groups
    # of H samples. An eighth of the budget allows H <= sqrt(budget / 32). H is a power of two, and need not exceed
    # the largest class.
    max_group_size = 1 << max(math.isqrt(budget // 32), 32).bit_length() - 1
    group_size = max(min(1 << (max(class_counts) - 1).bit_length(), max_group_size, 512), 32)
    # The layers after the deconvolution have 9 (c1 channels + 4 c1^2) weights: solve for half of the budget.
    c1 = min(max(channels, 32), 128, (math.isqrt(81 * channels**2 + 72 * budget) - 9 * channels) // 72)
    fixed: dict[str, object] = {
        **geometry(shape),
        "group_size": group_size,
        "stride": start_stride(height, width),
        "c1": max(c1 // 2 * 2, 8),
    }
    best = None
    for step in range(1, 200):
        # Multiples of 8 up to 128, then an eighth more at each step: close to the budget in few steps.
        c0 = 8 * step if step <= 16 else 8 * round(16 * 1.125 ** (step - 16))
        d0 = c0 if fixed["vector"] else min(4 * c0, 1536)
        config = from_dict(NetworkConfig, fixed | {"c0": c0, "d0": d0} | overrides)
        if best is not None and (config == best or count_parameters(config) > budget):
            break
        best = config
    assert best is not None
    return best


def default_parameters(num_values: int) -> int:
    """num_values / 8 weights, at most MAX_PARAMETERS. Small sets get num_values / 2.5, up to 2 million, since narrow
    networks learn slowly."""
    return int(min(max(num_values / 8, min(num_values / 2.5, 2e6)), MAX_PARAMETERS))
