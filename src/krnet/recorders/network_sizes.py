"""What a network takes: its tensors in a file, and the memory and the work of a replay. Shared by the recorders that
have one.

    network           -> stored_packed, stored_weights -> the tensors that hold its weights
    network, decoder  -> multiplications, numbers      -> of one sample; files that ask for too many are refused
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from krnet.coding.weights import PACKED_TENSORS, Rounding, packed_bytes
from krnet.nn.paper_config import DecoderConfig
from krnet.nn.paper_net import Decoder
from krnet.recorders.base import Stored
from krnet.recorders.memory import map_numbers

NET = "net."  # prefix of the network's tensors


def stored_packed(prefix: str, net: nn.Module, plan: Mapping[str, Rounding]) -> dict[str, Stored]:
    """The tensors that `coding.weights.pack` makes of a network; the stream's `most_bytes` bounds their sum."""
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    stored = {name: Stored() for name in PACKED_TENSORS}
    num_weights = sum(map(math.prod, shapes.values()))
    stored["stream"] = Stored(dtype=torch.uint8, most_bytes=packed_bytes(shapes, plan), num_decoded=num_weights)
    return {prefix + name: tensor for name, tensor in stored.items()}


def stored_weights(prefix: str, net: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Stored]:
    """The tensors of a network whose weights are stored unquantised."""
    return {prefix + name: Stored(tuple(p.shape), dtype) for name, p in net.named_parameters()}


def decoder_numbers(config: DecoderConfig) -> int:
    """Numbers of the maps of the paper's decoder that exist at once while a sample is replayed."""
    start_area, area = math.prod(config.start_size), config.height * config.width
    return map_numbers(config.d0, config.c0 * start_area, config.c1 * area, config.channels * area)


def multiplications(net: nn.Module, area: int) -> int:
    """Upper bound for one sample: each weight of a convolution meets each of `area` positions, others only one."""
    return sum(
        module.weight.numel() * (area if module.weight.ndim > 2 else 1)
        for module in net.modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | nn.Linear)
    )


def decoder_multiplications(config: DecoderConfig) -> int:
    """Of the paper's decoder, for one sample."""
    with torch.device("meta"):
        return multiplications(Decoder(config, 1), config.height * config.width)
