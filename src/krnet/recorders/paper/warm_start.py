"""Start a KRNet from an earlier one, so that it only has to learn the new samples.

    earlier recording + the new features' groups and range -> weights to start from

Layers are copied. A group gets the vectors of the earlier group with the same class and the same number within that
class; groups without one start at random. Where new samples widen a channel's range, the last module is rescaled so
that its outputs stay the same in the original scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from krnet.config import from_dict
from krnet.errors import InputError
from krnet.features.samples import Samples
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import Output
from krnet.nn.sizing import preset_config
from krnet.recorders.base import Earlier
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.ranges import read_range

GROUP_VECTORS = ("embed.static", "embed.dynamic")  # weights with one row per group
SAMPLE_CODES = "codes"  # the weight with one row per sample


def earlier_config(
    shape: tuple[int, ...], start: Earlier, preset: str | None, settings: Mapping[str, Any]
) -> NetworkConfig:
    """The earlier network's config. Preset and settings may repeat its values; other values are refused."""
    if start.recorder != "paper" or start.shape != shape:
        raise InputError(
            f"{start.path}: a recording of {start.shape} by {start.recorder}; these features are {shape} and need one "
            f"of the same shape by paper to start from"
        )
    config = from_dict(NetworkConfig, {name: value for name, value in start.settings.items() if name != "groups"})
    if preset is not None and preset_config(shape, preset, **settings) != config:
        raise InputError(f"{start.path}: is not of preset {preset!r}; a network that starts from it has its sizes")
    for name, value in settings.items():
        if getattr(config, name) != value:
            found = getattr(config, name)
            raise InputError(
                f"{start.path}: has {name} {found!r}, not {value!r}; a network that starts from it has its sizes"
            )
    return config


def carry_over(
    net: torch.nn.Module,
    start: Earlier,
    weights: Mapping[str, Tensor],
    samples: Samples,
    table: GroupTable,
    low: Tensor,
    high: Tensor,
) -> None:
    """Copy into `net`, which has the groups of `table`, what it can use of the weights of the recording `start`."""
    group_size = table.group_size
    old_table = GroupTable.build(len(start), start.labels, group_size)
    old_keys, new_keys = _group_keys(start.labels, old_table), _group_keys(samples.labels, table)
    old_groups = {key: group for group, key in enumerate(old_keys)}
    pairs = [(group, old_groups[key]) for group, key in enumerate(new_keys) if key in old_groups]  # (new, old)
    with torch.no_grad():
        for name, own in net.state_dict().items():
            old = weights[name]
            if name == SAMPLE_CODES:
                new_ids, old_ids = _same_samples(pairs, table, old_table)
                own[new_ids] = old[old_ids]
            elif name not in GROUP_VECTORS:
                own.copy_(old)
            elif pairs:
                new_rows, old_rows = (torch.tensor(side) for side in zip(*pairs, strict=True))
                own[new_rows] = old[old_rows]
        old_low, old_high = read_range(start, low.shape)
        span = torch.where(high > low, high - low, torch.ones_like(high))
        output = net.get_submodule("decoder.output")
        assert isinstance(output, Output), f"the last module is a {type(output).__name__}"
        output.rescale((old_high - old_low) / span, (old_low - low) / span)


def _group_keys(labels: Tensor | None, table: GroupTable) -> list[tuple[int | None, int]]:
    """For each group, its class and its number among the groups of that class."""
    first = torch.zeros(table.num_groups, dtype=torch.long)  # (groups,) ID of the first sample of each group
    first[table.group.flip(0)] = torch.arange(len(table.group)).flip(0)
    classes = [None] * table.num_groups if labels is None else labels[first].tolist()
    num_groups: dict[int | None, int] = {}  # of each class, so far
    keys = []
    for label in classes:
        keys.append((label, num_groups.get(label, 0)))
        num_groups[label] = num_groups.get(label, 0) + 1
    return keys


def _same_samples(pairs: list[tuple[int, int]], table: GroupTable, old_table: GroupTable) -> tuple[Tensor, Tensor]:
    """IDs of the samples that both recordings hold, by group and slot: in the new recording, and in the old one."""
    # (old groups + 1, slots): the old sample ID, or -1; the last row stands for groups that are new.
    old_ids = torch.full((old_table.num_groups + 1, old_table.group_size), -1)
    old_ids[old_table.group, old_table.slot] = torch.arange(len(old_table.group))
    old_group = torch.full((table.num_groups,), old_table.num_groups)  # of each new group
    for new, old in pairs:
        old_group[new] = old
    found = old_ids[old_group[table.group], table.slot]  # (N,)
    return (found >= 0).nonzero()[:, 0], found[found >= 0]
