"""Predict the size of a recording before it is made, and reproduce the storage table of the paper.

shape, number of samples, recorder, settings -> plan -> dict of counts and bytes

The table compares the paper's network with an autoencoder (Zhang et al., "KRNet: Towards Efficient Knowledge Replay",
2022). Both have the same decoder. The autoencoder stores a code per sample, the paper's network two vectors per group.
The encoder is not counted, because replay does not need it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch

from krnet.config import check_int, parse_size
from krnet.errors import SettingError
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import count_parameters, preset_config, sizes_for
from krnet.recorders.base import (
    Recorder,
    Stored,
    check_inputs,
    check_names,
    default_recorder,
    get_recorder,
    tensor_bytes,
)
from krnet.recorders.fit import NET
from krnet.recorders.paper.groups import num_groups
from krnet.recorders.paper.recorder import PaperRecorder

FLOAT_BYTES = 4  # fp32


def plan(
    shape: Sequence[int],
    num_samples: int | None = None,
    *,
    class_counts: Sequence[int] | None = None,
    preset: str | None = None,
    recorder: str | None = None,
    budget: int | str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Predict the size of a recording before it is made: what `krnet.record` would write, without any features.

    shape         shape of one feature map: (64, 8, 8)
    num_samples   number of samples, for features without classes; or give class_counts
    class_counts  number of samples of each class: [500] * 50
    budget, recorder, preset, and other settings: as for `krnet.record`

    In the result, `file_bytes` is the budget, else the recorder's default budget, else the sum of its tensors, without
    the header of a few kilobytes. For recorder paper without a budget, which a preset selects, the result is the
    storage table of the paper instead, and the size is `krnet_bytes`.

    >>> import krnet
    >>> krnet.plan((64, 8, 8), 25_000, budget="6.5MB")["bits_per_value"]
    0.5078125
    """
    if (num_samples is None) == (class_counts is None):
        raise SettingError("give either num_samples or class_counts, and not both")
    if class_counts is None:
        check_int("num_samples", num_samples, 1)
        class_counts = [num_samples or 0]
    shape, class_counts = tuple(map(_as_int, shape)), list(map(_as_int, class_counts))
    for size in shape:
        check_int("shape", size, 1)
    if not class_counts:
        raise SettingError("class_counts is empty; expected the number of samples of at least one class")
    for count in class_counts:
        check_int("class_counts", count, 1)
    chosen = get_recorder(recorder or default_recorder(preset))
    check_inputs(chosen, {"preset": preset})
    check_names(chosen, settings)
    if isinstance(chosen, PaperRecorder) and budget is None:
        return plan_paper(shape, class_counts, preset, **settings)
    num_samples = sum(class_counts)
    num_values = num_samples * math.prod(shape)
    file_bytes = parse_size(budget) if budget is not None else chosen.default_budget(num_values, settings)
    if file_bytes is None:
        file_bytes = _sum_tensor_bytes(chosen, shape, num_samples, settings)
    feature_bytes = num_values * FLOAT_BYTES
    return {
        "num_samples": num_samples,
        "num_classes": len(class_counts),
        "shape": list(shape),
        "recorder": chosen.name,
        "feature_bytes": feature_bytes,
        "file_bytes": file_bytes,
        "bits_per_value": 8 * file_bytes / num_values,
        "compression_ratio_bytes": feature_bytes / file_bytes,
        "settings": settings,
    }


def _as_int(value: Any) -> Any:
    """The whole number that numpy or torch hold; anything else as it is, for a check to refuse."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def _sum_tensor_bytes(recorder: Recorder, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> int:
    """Add up the tensors that the recorder declares; refuse a recorder whose sizes depend on the features."""
    defaults = {f.name: f.default for f in fields(recorder.config_class) if f.default is not MISSING}
    try:
        stored = recorder.stored(shape, num_samples, {**defaults, **settings})
    except (SettingError, KeyError):
        stored = {"settings": Stored()}  # a setting has no default: it is found by looking at the features
    if any(tensor.size_bytes is None for tensor in stored.values()):
        raise SettingError(
            f"what recorder {recorder.name} takes follows from the features; give a budget (--budget) to plan it"
        )
    return tensor_bytes(stored)


def plan_paper(
    shape: tuple[int, ...], class_counts: list[int], preset: str | None = None, **settings: Any
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
    if preset is not None:
        config = preset_config(shape, preset, **settings)
    else:
        config = sizes_for(shape, class_counts, **settings)

    num_samples, total_groups = sum(class_counts), num_groups(class_counts, config.group_size)
    code_bytes = 2 * config.group_size * FLOAT_BYTES
    with torch.device("meta"):
        decoder = Decoder(config, 2 * config.group_size)
    feature_bytes = num_samples * math.prod(shape) * FLOAT_BYTES
    stored = PaperRecorder().stored(shape, num_samples, {**asdict(config), "groups": [0] * total_groups})
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
