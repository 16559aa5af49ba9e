"""The storage table of the paper: its network beside an autoencoder with the same decoder.

shape, class counts, config, declared tensors -> storage_table -> dict of counts and bytes

The autoencoder stores a code per sample, the paper's network two vectors per group. The encoder is not counted,
because replay does not need it. Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import count_parameters
from krnet.recorders.base import FLOAT_BYTES, Stored, tensor_bytes
from krnet.recorders.network_sizes import NET
from krnet.recorders.paper.groups import num_groups


def storage_table(
    shape: tuple[int, ...],
    class_counts: list[int],
    preset: str | None,
    config: NetworkConfig,
    stored: Mapping[str, Stored],
) -> dict[str, Any]:
    """Storage of the paper's network and of its autoencoder, with the quantities of the paper's table.

    feature_bytes             the features as fp32
    autoencoder_code_bytes    2H floats per sample (H is group_size), 1,024 in the paper
    krnet_code_bytes          2H floats per group; a group holds samples of one class only
    autoencoder_network_bytes weights of the decoder
    krnet_network_bytes       weights of the decoder and of the embedding's FC layers, without codes
    krnet_bytes               network and codes: the file without its header of a few kilobytes
    compression_ratio         as the paper counts: 1,000 * (features in GiB) / (network and codes in MiB), which is
                              1,000 / 1,024 of compression_ratio_bytes. Rounded down it gives the paper's printed
                              numbers: 36x for 64,817 samples and 180x for 319,811
    compression_ratio_bytes   feature_bytes / krnet_bytes
    settings                  the network that `record` would build
    """
    num_samples, total_groups = sum(class_counts), num_groups(class_counts, config.group_size)
    code_bytes = 2 * config.group_size * FLOAT_BYTES
    with torch.device("meta"):
        decoder = Decoder(config, 2 * config.group_size)
    feature_bytes = num_samples * math.prod(shape) * FLOAT_BYTES
    krnet_bytes = tensor_bytes({name: tensor for name, tensor in stored.items() if name.startswith(NET)})
    num_codes = 2 * config.group_size * total_groups + config.code * num_samples
    krnet_code_bytes = min(FLOAT_BYTES * num_codes, krnet_bytes)
    if config.bits is not None:  # coded with the weights: by their share of all numbers
        krnet_code_bytes = krnet_bytes * num_codes // count_parameters(config, total_groups)
    return {
        "num_samples": num_samples,
        "num_classes": len(class_counts),
        "num_groups": total_groups,
        "shape": list(shape),
        "preset": preset,
        "recorder": "paper",
        "feature_bytes": feature_bytes,
        "autoencoder_code_bytes": num_samples * code_bytes,
        "krnet_code_bytes": krnet_code_bytes,
        "autoencoder_network_bytes": sum(p.numel() for p in decoder.parameters()) * FLOAT_BYTES,
        "krnet_network_bytes": krnet_bytes - krnet_code_bytes,
        "krnet_bytes": krnet_bytes,
        "compression_ratio": feature_bytes / 2**30 * 1000 / (krnet_bytes / 2**20),
        "compression_ratio_bytes": feature_bytes / krnet_bytes,
        "settings": asdict(config),
    }
