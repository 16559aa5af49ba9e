"""How large a network: counted without building it, and solved for features of any shape and number.

shape, class counts -> sizes_for -> NetworkConfig
NetworkConfig       -> count_parameters -> number of stored weights
"""

from __future__ import annotations

import math

import torch

from krnet.config import check_choice, from_dict
from krnet.nn.paper_config import KERNEL, PRESETS, NetworkConfig
from krnet.nn.paper_net import BatchedIDEmbedding, Decoder

MAX_START_AREA = 100  # 10 x 10: larger maps start smaller and are brought up by the deconvolution
MAX_PARAMETERS = 100_000_000


def map_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of samples of any shape: axis 0 is the channel, the last one the width."""
    if len(shape) <= 1:
        return shape[0] if shape else 1, 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def count_parameters(config: NetworkConfig, num_groups: int = 0) -> int:
    """Weights of decoder and embedding, the vectors of `num_groups` groups included."""
    with torch.device("meta"):
        modules = Decoder(config, config.input_size), BatchedIDEmbedding(num_groups, config.group_size)
    return sum(p.numel() for module in modules for p in module.parameters())


def preset_config(shape: tuple[int, ...], preset: str, **overrides: object) -> NetworkConfig:
    check_choice("preset", preset, PRESETS)
    channels, height, width = map_shape(shape)
    geometry = {"channels": channels, "height": height, "width": width, "vector": len(shape) <= 1}
    return from_dict(NetworkConfig, geometry | PRESETS[preset] | overrides)


def sizes_for(
    shape: tuple[int, ...], class_counts: list[int], num_parameters: int | None = None, **overrides: object
) -> NetworkConfig:
    """The widest decoder within `num_parameters`, by default a share of the number of values to record.

    An eighth of the weights may go to the embedding and half to the layers behind the deconvolution; the rest,
    which is nearly all in a large network, is the second FC layer, where samples are told apart.
    """
    channels, height, width = map_shape(shape)
    vector = len(shape) <= 1
    budget = num_parameters or default_parameters(sum(class_counts) * math.prod(shape))
    # Room for the largest class, as far as 4 H^2 weights (two FC layers, and the one behind them) are affordable.
    affordable = 1 << max(math.isqrt(budget // 32), 32).bit_length() - 1
    group_size = max(min(1 << (max(class_counts) - 1).bit_length(), affordable, 512), 32)
    # 9 (c1 channels + 4 c1^2) weights behind the deconvolution
    c1 = min(max(channels, 32), 128, (math.isqrt(81 * channels**2 + 72 * budget) - 9 * channels) // 72)
    start: dict[str, object] = {
        "channels": channels,
        "height": height,
        "width": width,
        "vector": vector,
        "group_size": group_size,
        "stride": next((s for s in range(1, KERNEL) if -(-height // s) * -(-width // s) <= MAX_START_AREA), KERNEL),
        "c1": max(c1 // 2 * 2, 8),
    }
    best = None
    for step in range(1, 200):
        # Eighths, then steps of an eighth more: fine enough for a budget, few enough to solve at once.
        c0 = 8 * step if step <= 16 else 8 * round(16 * 1.125 ** (step - 16))
        d0 = c0 if vector else min(4 * c0, 1536)
        config = from_dict(NetworkConfig, start | {"c0": c0, "d0": d0} | overrides)
        if best is not None and (config == best or count_parameters(config) > budget):
            break
        best = config
    assert best is not None
    return best


def default_parameters(num_values: int) -> int:
    """An eighth as many weights as values; more for small sets, where a narrow network would learn too slowly."""
    return int(min(max(num_values / 8, min(num_values / 2.5, 2e6)), MAX_PARAMETERS))
