"""The paper's KRNet: fit a network so that net(sample ID) returns that sample's feature map.

    ids (B,) -> (group, slot) -> embed -> decode -> normalised features (B, c, h, w) -> original scale

The weights are the storage: fitting is writing, calling is reading.

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022). Deviations, all measured in notes/choices.md: full
convolutions after the deconvolution; the last norm starts from the mean and standard deviation of the features; with
schedule "fast", Muon trains the matrices. `schedule="paper"` is the paper's schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from krnet.coding.search import largest_fitting
from krnet.coding.weights import Rounding, pack, rounded, rounding_plan, step_for, unpack
from krnet.config import from_dict
from krnet.device import exact_math
from krnet.errors import SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import KRNet
from krnet.nn.sizing import preset_config, sizes_for
from krnet.recorders.axes import principal_axes
from krnet.recorders.base import Content, Job, Stored, register
from krnet.recorders.checks import reading_settings
from krnet.recorders.fit import NetworkFit, run_fit
from krnet.recorders.maps import coordinates
from krnet.recorders.network_replayer import NetworkReplayer
from krnet.recorders.network_sizes import NET, decoder_multiplications, decoder_numbers, stored_packed, stored_weights
from krnet.recorders.paper.groups import GroupTable, num_groups
from krnet.recorders.paper.plan import storage_table
from krnet.recorders.paper.warm_start import carry_over, earlier_config
from krnet.recorders.presets import PresetRecorder, check_geometry, on_meta
from krnet.recorders.ranges import read_range, stored_range
from krnet.recorders.sizes import file_bytes
from krnet.train.loop import Outcome

BUDGET_WEIGHT_BITS = 4.0  # bits of a weight when a budget is given


def rounding(net: KRNet, config: NetworkConfig) -> dict[str, Rounding]:
    """How each weight is rounded, by name; the few weights that are left out are stored as fp16."""
    plan = rounding_plan(net, config.bits)
    if config.bits is not None and net.codes is not None:
        plan["codes"] = Rounding(1, step_for(config.code_bits))
    return plan


class KRNetFit(NetworkFit):
    net: KRNet

    def __init__(self, job: Job, config: NetworkConfig, table: GroupTable):
        self.config, self.table = config, table
        self.group, self.slot = table.group.to(job.device), table.slot.to(job.device)
        self.rounding = rounding(meta_network(config, table.num_groups, job.samples.num_samples), config)
        super().__init__(job, self._start)

    def _start(self) -> KRNet:
        job, stats = self.job, self.job.stats
        net = KRNet(self.config, self.table.num_groups, job.samples.num_samples)
        if net.codes is not None:
            start_codes(net.codes, job)
        net.decoder.output.start_from(stats.normalised_mean.float(), stats.normalised_std.float())
        if job.start is not None:
            old_table = GroupTable.build(len(job.start), job.start.labels, self.config.group_size)
            old_net = meta_network(self.config, old_table.num_groups, len(job.start))
            weights = read_weights(job.start, old_net, self.config)
            carry_over(net, job.start, weights, job.samples, self.table, stats.low, stats.high)
        return net

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Replays computed with the weights rounded as the file will hold them."""
        inputs = self.group[ids], self.slot[ids], ids
        if not self.rounding:
            return self.net(*inputs)
        return functional_call(self.net, rounded(dict(self.net.named_parameters()), self.rounding), inputs)

    def content(self, outcome: Outcome) -> Content:
        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        stored = pack(weights, self.rounding) if self.rounding else weights
        tensors = {f"{NET}{name}": value for name, value in stored.items()}
        return Content(
            tensors={**tensors, "low": self.job.stats.low, "high": self.job.stats.high},
            settings={**asdict(self.config), "groups": self.table.counts()},
            iterations=outcome.iterations,
            seconds=outcome.seconds,
            stopped_by=outcome.reason,
        )


class ByID(nn.Module):
    """The network as a function of sample IDs: ids (B,) -> normalised features (B, c, h, w)."""

    def __init__(self, net: KRNet, table: GroupTable):
        super().__init__()
        self.net = net
        self.register_buffer("group", table.group)
        self.register_buffer("slot", table.slot)
        self.group: Tensor
        self.slot: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.group[ids], self.slot[ids], ids)


@register
class PaperRecorder(PresetRecorder):
    name = "paper"
    header_name = "krnet"
    config_class = NetworkConfig
    inputs = frozenset({"preset", "head", "start"})
    starts_warm = True

    def with_derived(self, settings: Mapping[str, Any], shape: tuple[int, ...], num_samples: int) -> dict[str, Any]:
        """With as few groups as hold the samples; classes may need more."""
        group_size = settings.get("group_size")
        groups = {} if group_size is None else {"groups": [0] * num_groups([num_samples], group_size)}
        return {**super().with_derived(settings, shape, num_samples), **groups}

    def config(self, job: Job) -> NetworkConfig:
        if job.start is not None:
            return earlier_config(job.source.shape, job.start, job.preset, job.settings)
        if job.preset is not None:
            return preset_config(job.source.shape, job.preset, **job.settings)
        # The paper's learning rate needs the last norm: without it, Adam's steps push the output below zero for good.
        last_norm = job.fit.schedule == "paper"
        return sizes_for(job.source.shape, job.samples.class_counts(), **{"last_norm": last_norm, **job.settings})

    def fit(self, job: Job) -> Content:
        config = self.config(job)
        table = GroupTable.build(job.samples.num_samples, job.samples.labels, config.group_size)
        return run_fit(self, KRNetFit(job, config, table), asdict(config))

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """The widest network, at few bits per weight. A network that starts from an earlier one keeps its sizes."""
        if job.start is not None:
            return {}
        network = {"bits": BUDGET_WEIGHT_BITS, "last_norm": job.fit.schedule == "paper", **job.settings}

        def fitting(make: Callable[[int], NetworkConfig], low: int, high: int) -> NetworkConfig:
            """The last of make(low), ..., make(high) whose file fits the budget; make(low) if none does."""
            return make(largest_fitting(lambda n: self.size_bytes(job, make(n)) <= budget, low, high))

        if job.preset is not None:
            found = preset_config(job.source.shape, job.preset, **network)
        else:
            shape, counts = job.source.shape, job.samples.class_counts()
            found = fitting(lambda n: sizes_for(shape, counts, int(10 ** (n / 10)), **network), 30, 85)
            if "c0" not in job.settings and found.c0 >= 32:
                found = replace(found, c0=found.c0 // 16 * 16)  # multiples of 8 for each of the norm's two groups
            if "d0" not in job.settings:  # the widest layer takes the bytes that are left, at most doubling d0
                first = found
                found = fitting(lambda n: replace(first, d0=8 * n), first.d0 // 8, first.d0 // 4)
        return {name: value for name, value in asdict(found).items() if name in self.setting_names}

    def size_bytes(self, job: Job, config: NetworkConfig) -> int:
        """Upper bound of the size of a file with these settings."""
        table = GroupTable.build(job.samples.num_samples, job.samples.labels, config.group_size)
        settings = {**asdict(config), "groups": table.counts()}
        return file_bytes(job, self.stored(job.source.shape, len(job.source), settings), settings)

    def stored(self, shape: Sequence[int], num_samples: int, settings: Mapping[str, Any]) -> dict[str, Stored]:
        config = network_config(settings)
        net = meta_network(config, len(settings["groups"]), num_samples)
        plan = rounding(net, config)
        weights = stored_packed(NET, net, plan) if plan else stored_weights(NET, net)
        return {**stored_range((config.channels,)), **weights}

    def working_numbers(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return decoder_numbers(network_config(settings))

    def network_multiplications(self, shape: Sequence[int], settings: Mapping[str, Any]) -> int:
        return decoder_multiplications(network_config(settings))

    def storage_table(
        self, shape: tuple[int, ...], class_counts: list[int], preset: str | None, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        if preset is not None:
            config = preset_config(shape, preset, **settings)
        else:
            config = sizes_for(shape, class_counts, **settings)
        groups = [0] * num_groups(class_counts, config.group_size)
        stored = self.stored(shape, sum(class_counts), {**asdict(config), "groups": groups})
        return storage_table(shape, class_counts, preset, config, stored)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> NetworkReplayer:
        """Check all sizes against the tensors in the file before allocating anything."""
        with reading_settings(self.name):
            config = network_config(settings)
            check_geometry(config, samples.shape)
            table = GroupTable.build(samples.num_samples, samples.labels, config.group_size)
            if settings["groups"] != table.counts():
                raise SettingError("a group table that does not follow from the labels")
        net = meta_network(config, table.num_groups, samples.num_samples)
        net.load_state_dict(read_weights(store, net, config), assign=True)
        if device.type == "cpu":  # where this layout makes depthwise convolutions faster
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        low, high = read_range(store, (config.channels,))
        max_map_values = math.prod(net.decoder.start_shape)
        by_id = ByID(net, table)
        return NetworkReplayer(by_id, lambda ids: ids.to(device), max_map_values, samples, low, high, device)


def network_config(settings: Mapping[str, Any]) -> NetworkConfig:
    """The config from the settings of a file, which also hold the sizes of the groups."""
    return from_dict(NetworkConfig, {name: value for name, value in settings.items() if name != "groups"})


def meta_network(config: NetworkConfig, num_groups: int, num_samples: int) -> KRNet:
    return on_meta(lambda: KRNet(config, num_groups, num_samples))


def read_weights(store: TensorStore, net: KRNet, config: NetworkConfig) -> dict[str, Tensor]:
    """The recording's weights for `net`, which gives the names and shapes."""
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    if plan := rounding(net, config):
        return unpack(store, NET, shapes, plan)
    return {name: store.tensor(f"{NET}{name}", shape=s, dtype=torch.float32) for name, s in shapes.items()}


@torch.no_grad()
def start_codes(codes: Tensor, job: Job) -> None:
    """Set codes (N, k) to the coordinates of the samples along their first k principal axes, in standard deviations."""
    with exact_math():
        found = principal_axes(job, codes.shape[1])
        num_axes = min(codes.shape[1], len(found.std))
        axes = found.axes[:num_axes] / found.std[:num_axes, None].clamp(min=1e-12)  # (num_axes, values)
        codes[:, :num_axes] = coordinates(job, found.mean, axes.T).to(codes)
