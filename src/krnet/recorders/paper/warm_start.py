"""Start a KRNet from an earlier one, so that recording more samples costs what is new.

    earlier recording + the new features' groups and range -> weights to start from

Layers are taken over as they are. A group takes over the vectors of the earlier group of the same class and place in
that class; others start at random. Where new samples widen a channel's range, the last module is rescaled to it.
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

VECTORS = ("embed.static", "embed.dynamic")
CODES = "codes"


def earlier_config(
    shape: tuple[int, ...], start: Earlier, preset: str | None, settings: Mapping[str, Any]
) -> NetworkConfig:
    """The earlier network's sizes; preset and settings may repeat them and not change them."""
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
    """Load what the earlier recording, of these weights, knows into `net`, whose groups are those of `table`."""
    group_size = table.group_size
    old_table = GroupTable.build(len(start), start.labels, group_size)
    places = _places(start.labels, old_table), _places(samples.labels, table)
    earlier = {place: index for index, place in enumerate(places[0])}
    pairs = [(new, earlier[place]) for new, place in enumerate(places[1]) if place in earlier]
    with torch.no_grad():
        for name, own in net.state_dict().items():
            old = weights[name]
            if name == CODES:
                new_ids, old_ids = _same_samples(pairs, table, old_table)
                own[new_ids] = old[old_ids]
            elif name not in VECTORS:
                own.copy_(old)
            elif pairs:
                new_rows, old_rows = (torch.tensor(side) for side in zip(*pairs, strict=True))
                own[new_rows] = old[old_rows]
        old_low, old_high = (start.tensor(name, shape=low.shape, dtype=torch.float32) for name in ("low", "high"))
        span = torch.where(high > low, high - low, torch.ones_like(high))
        output = net.get_submodule("decoder.output")
        assert isinstance(output, Output), f"the last module is a {type(output).__name__}"
        output.rescale((old_high - old_low) / span, (old_low - low) / span)


def _places(labels: Tensor | None, table: GroupTable) -> list[tuple[int | None, int]]:
    """Of each group: its class, and its number among the groups of that class."""
    first = torch.zeros(table.num_groups, dtype=torch.long)
    first[table.group.flip(0)] = torch.arange(len(table.group)).flip(0)  # the first sample of each group
    classes = [None] * table.num_groups if labels is None else labels[first].tolist()
    seen: dict[int | None, int] = {}
    places = []
    for name in classes:
        places.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return places


def _same_samples(pairs: list[tuple[int, int]], table: GroupTable, old_table: GroupTable) -> tuple[Tensor, Tensor]:
    """IDs of samples that are in both, by group and slot: in the new recording and in the old one."""
    ids = torch.full((old_table.num_groups + 1, old_table.group_size), -1)  # the last row: groups that are new
    ids[old_table.group, old_table.slot] = torch.arange(len(old_table.group))
    earlier = torch.full((table.num_groups,), old_table.num_groups)
    for new, old in pairs:
        earlier[new] = old
    found = ids[earlier[table.group], table.slot]
    return (found >= 0).nonzero()[:, 0], found[found >= 0]
