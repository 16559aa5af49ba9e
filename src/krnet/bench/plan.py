"""Predict the size of a recording before it is made.

shape, number of samples, recorder, settings -> plan -> dict of counts and bytes

For recorder paper, this is the storage table of the paper (recorders/paper/plan.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from krnet.config import check_int, from_dict, parse_size
from krnet.errors import SettingError
from krnet.recorders.base import FLOAT_BYTES, Recorder, Stored, default_recorder, get_recorder, tensor_bytes
from krnet.recorders.checks import check_inputs, check_names
from krnet.train.config import FitConfig

UNKNOWN = 4  # stands for a setting that is found for the features while the others are checked; all take it


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
    shape = tuple(map(_as_int, _as_sequence("shape", shape, "(64, 8, 8)")))
    if class_counts is None:
        num_samples = _as_int(num_samples)
        check_int("num_samples", num_samples, 1)
        class_counts = [num_samples or 0]
    class_counts = list(map(_as_int, _as_sequence("class_counts", class_counts, "[500, 500]")))
    for size in shape:
        check_int("shape", size, 1)
    if not class_counts:
        raise SettingError("class_counts is empty; expected the number of samples of at least one class")
    for count in class_counts:
        check_int("class_counts", count, 1)
    chosen = get_recorder(recorder or default_recorder(preset))
    check_inputs(chosen, {"preset": preset})
    check_names(chosen, settings)
    own = check_settings(chosen, shape, sum(class_counts), settings)
    table = chosen.storage_table(shape, class_counts, preset, own) if budget is None else None
    if table is not None:
        return table
    num_samples, num_values = sum(class_counts), sum(class_counts) * math.prod(shape)
    file_bytes = parse_size(budget) if budget is not None else chosen.default_budget(num_values, settings)
    is_budget = file_bytes is not None  # then file_bytes is an upper bound
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
        "is_budget": is_budget,
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


def _as_sequence(name: str, given: Any, example: str) -> Sequence[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
        raise SettingError(f"{name} is {given!r}; expected a list of whole numbers, such as {example}")
    return tuple(given)


def check_settings(
    recorder: Recorder, shape: tuple[int, ...], num_samples: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Refuse values that `krnet.record` would refuse; return the recorder's own settings, without those of its fit."""
    own = {name: value for name, value in settings.items() if name in recorder.setting_names}
    from_dict(FitConfig, {name: value for name, value in settings.items() if name not in own})
    known = {f.name: f for f in fields(recorder.config_class)}
    found_later = {name: UNKNOWN for name, f in known.items() if f.default is f.default_factory is MISSING}
    complete = found_later | recorder.with_derived(own, shape, num_samples)
    from_dict(recorder.config_class, {name: value for name, value in complete.items() if name in known})
    return own


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
