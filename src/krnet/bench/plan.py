"""What recording would cost, before doing it: bytes of the features and of the file; the paper's storage table.

shape, class counts, recorder, settings -> plan -> dict of counts and bytes

The autoencoder of Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022), has the same decoder and stores a
code per sample where KRNet stores two vectors per group; its encoder is not needed to replay and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import torch

from krnet.config import check_int, parse_size
from krnet.errors import SettingError
from krnet.nn.paper_net import Decoder
from krnet.nn.sizing import count_parameters, preset_config, sizes_for
from krnet.recorders.base import Recorder, Stored, check_inputs, check_names, get_recorder, tensor_bytes
from krnet.recorders.paper.groups import num_groups
from krnet.recorders.paper.recorder import PaperRecorder

FLOAT_BYTES = 4


def plan(
    shape: Sequence[int],
    class_counts: Sequence[int],
    preset: str | None = None,
    *,
    recorder: str | None = None,
    budget: int | str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What `record` would write for `class_counts` samples of `shape`; nothing is built or read.

    Of recorder paper, which a preset selects, the network and, beside it, what the paper compares it with. Of others
    the most bytes of the file: the budget, the recorder's own where none is given, or what its tensors take.
    """
    shape, class_counts = tuple(shape), list(class_counts)
    for size in shape:
        check_int("shape", size, 1)
    if not class_counts:
        raise SettingError("class_counts is empty; expected the number of samples of at least one class")
    for count in class_counts:
        check_int("class_counts", count, 1)
    chosen = get_recorder(recorder or ("krnet" if preset is None else "paper"))
    check_inputs(chosen, {"preset": preset})
    check_names(chosen, settings)
    if isinstance(chosen, PaperRecorder) and budget is None:
        return plan_paper(shape, class_counts, preset, **settings)
    num_samples, num_values = sum(class_counts), sum(class_counts) * math.prod(shape)
    most = parse_size(budget) if budget is not None else chosen.default_budget(num_values, settings)
    if most is None:
        most = _tensor_bytes(chosen, shape, num_samples, settings)
    feature_bytes = num_values * FLOAT_BYTES
    return {
        "num_samples": num_samples,
        "num_classes": len(class_counts),
        "shape": list(shape),
        "recorder": chosen.name,
        "feature_bytes": feature_bytes,
        "file_bytes": most,
        "bits_per_value": 8 * most / num_values,
        "compression_ratio_bytes": feature_bytes / most,
        "settings": settings,
    }


def _tensor_bytes(recorder: Recorder, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> int:
    """By the tensors that the recorder declares; refused where their sizes follow from the features."""
    defaults = {f.name: f.default for f in fields(recorder.config_class) if f.default is not MISSING}
    try:
        stored = recorder.stored(shape, num_samples, {**defaults, **settings})
    except (SettingError, KeyError):
        stored = {"settings": Stored()}
    if any(tensor.size_bytes is None for tensor in stored.values()):
        raise SettingError(
            f"what recorder {recorder.name} takes follows from the features; give a budget (--budget) to plan it"
        )
    return tensor_bytes(stored)


def plan_paper(
    shape: tuple[int, ...], class_counts: list[int], preset: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Storage of the paper's network and of its autoencoder, as the paper's table has it.

    feature_bytes             the features as fp32
    autoencoder_code_bytes    2H floats a sample (H is group_size), 1,024 in the paper
    krnet_code_bytes          2H floats a group: M groups in all, none with samples of two classes
    autoencoder_network_bytes weights of the decoder
    krnet_network_bytes       weights of the decoder and of the embedding's FC layers, without codes
    krnet_bytes               network and codes: the file, but for a header of a few kilobytes
    compression_ratio         as the paper counts: features in GiB, times 1,000, by network and codes in MiB. It is
                              1,000 / 1,024 of the plain quotient. Cut, not rounded, it is the 36x that the paper
                              prints for 64,817 samples and the 180x for 319,811
    compression_ratio_bytes   the plain quotient, feature_bytes / krnet_bytes
    settings                  the network, as `record` would build it
    """
    if preset is not None:
        config = preset_config(shape, preset, **settings)
    else:
        config = sizes_for(shape, class_counts, **settings)

    num_samples, groups = sum(class_counts), num_groups(class_counts, config.group_size)
    code_bytes = 2 * config.group_size * FLOAT_BYTES
    with torch.device("meta"):
        decoder = Decoder(config, 2 * config.group_size)
    feature_bytes = num_samples * math.prod(shape) * FLOAT_BYTES
    network_bytes = count_parameters(config) * FLOAT_BYTES
    krnet_bytes = network_bytes + groups * code_bytes
    return {
        "num_samples": num_samples,
        "num_classes": len(class_counts),
        "num_groups": groups,
        "shape": list(shape),
        "preset": preset,
        "recorder": "paper",
        "feature_bytes": feature_bytes,
        "autoencoder_code_bytes": num_samples * code_bytes,
        "krnet_code_bytes": groups * code_bytes,
        "autoencoder_network_bytes": sum(p.numel() for p in decoder.parameters()) * FLOAT_BYTES,
        "krnet_network_bytes": network_bytes,
        "krnet_bytes": krnet_bytes,
        "compression_ratio": feature_bytes / 2**30 * 1000 / (krnet_bytes / 2**20),
        "compression_ratio_bytes": feature_bytes / krnet_bytes,
        "settings": asdict(config),
    }
