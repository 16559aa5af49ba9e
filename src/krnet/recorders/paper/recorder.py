"""KRNet: fit a network so that net(sample ID) returns that sample's feature map.

    ids (B,) -> (group, slot) -> embed -> decode -> normalised features (B, c, h, w) -> original scale

The weights are the storage: fitting is writing, calling is reading.

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022). Deviations, all measured in docs/choices.md: full
convolutions after the deconvolution, the last norm started from the data, and, with schedule "fast", Muon on the
matrices. `schedule="paper"` is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from krnet.coding.search import largest
from krnet.coding.weights import NUM_TENSORS, Rounding, pack, packed_bytes, rounded, step_for, unpack
from krnet.config import check_choice, from_dict
from krnet.device import exact_math
from krnet.errors import InputError, NotARecordingError, OversizedRecordingError, SettingError
from krnet.features.samples import Samples
from krnet.io.archive import TensorStore
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import KRNet
from krnet.nn.sizing import map_shape, preset_config, sizes_for
from krnet.recorders.axes import principal_axes
from krnet.recorders.base import Content, Earlier, Job, Recorder, overhead_bytes, register
from krnet.recorders.compact import budget as _compact_budget
from krnet.recorders.compact.growth import grow
from krnet.recorders.compact.network import CompactConfig
from krnet.recorders.compact.recorder import fit as fit_compact
from krnet.recorders.compact.recorder import replay as replay_compact
from krnet.recorders.fit import NET, NetworkFit, NetworkReplayer, rounding_plan, run_fit
from krnet.recorders.maps import coordinates
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.paper.warm_start import carry_over, earlier_config
from krnet.train.loop import Outcome

# The geometry follows from the features and is not the caller's to set.
NETWORK_NAMES = frozenset(f.name for f in fields(NetworkConfig)) - {"channels", "height", "width", "vector"}
COMPACT_NAMES = frozenset(f.name for f in fields(CompactConfig))
CHEAP_BITS = 4.0  # of a weight, under a budget


def rounding(net: KRNet, config: NetworkConfig) -> dict[str, Rounding]:
    """Which weights are kept in how many bits; the others are few, and kept as fp16."""
    plan = rounding_plan(net, config.bits)
    if config.bits is not None and net.codes is not None:
        plan["codes"] = Rounding(1, step_for(config.code_bits))
    return plan


class KRNetFit(NetworkFit):
    net: KRNet

    def __init__(self, job: Job, config: NetworkConfig, table: GroupTable):
        self.config, self.table = config, table
        self.group, self.slot = table.group.to(job.device), table.slot.to(job.device)
        self.rounding = rounding(empty(config, table.num_groups, job.samples.num_samples), config)
        super().__init__(job, self._start)

    def _start(self) -> KRNet:
        job, stats = self.job, self.job.stats
        net = KRNet(self.config, self.table.num_groups, job.samples.num_samples)
        if net.codes is not None:
            start_codes(net.codes, job)
        net.decoder.output.start_from(stats.normalised_mean.float(), stats.normalised_std.float())
        if job.start is not None:
            old = GroupTable.build(len(job.start), job.start.labels, self.config.group_size)
            weights = stored_weights(job.start, empty(self.config, old.num_groups, len(job.start)), self.config)
            carry_over(net, job.start, weights, job.samples, self.table, stats.low, stats.high)
        return net

    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """Computed with the weights as the file will hold them."""
        inputs = self.group[ids], self.slot[ids], ids
        if not self.rounding:
            return self.net(*inputs)
        return functional_call(self.net, rounded(dict(self.net.named_parameters()), self.rounding), inputs)

    def content(self, outcome: Outcome) -> Content:
        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        kept = pack(weights, self.rounding) if self.rounding else weights
        tensors = {f"{NET}{name}": value for name, value in kept.items()}
        return Content(
            tensors={**tensors, "low": self.job.stats.low, "high": self.job.stats.high},
            settings={**asdict(self.config), "groups": self.table.counts()},
            iterations=outcome.iterations,
            seconds=outcome.seconds,
            stopped_by=outcome.reason,
        )


class ByID(nn.Module):
    """ids (B,) -> normalised features"""

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
class KRNetRecorder(Recorder):
    name = "krnet"
    takes_head = True
    grows = True  # where it is compact
    setting_names = NETWORK_NAMES | COMPACT_NAMES

    def config(self, job: Job) -> NetworkConfig:
        settings = {name: value for name, value in job.settings.items() if name != "network"}
        job = replace(job, settings=settings)
        if job.start is not None:
            return earlier_config(job.source.shape, job.start, job.preset, job.settings)
        if job.preset is not None:
            return preset_config(job.source.shape, job.preset, **job.settings)
        # Without the last norm Adam's steps, as large as the paper's, push the output below zero, where it stays.
        last_norm = job.fit.schedule == "paper"
        return sizes_for(job.source.shape, job.samples.class_counts(), **{"last_norm": last_norm, **job.settings})

    def fit(self, job: Job) -> Content:
        check_choice("network", job.settings.get("network", "paper"), ("paper", "compact"))
        if is_compact(job.start) and job.settings.get("network", "compact") == "compact":
            return grow(self, job)
        if job.settings.get("network") == "compact":
            return fit_compact(self, job)
        config = self.config(job)
        table = GroupTable.build(job.samples.num_samples, job.samples.labels, config.group_size)
        return run_fit(self, KRNetFit(job, config, table), asdict(config))

    def for_budget(self, job: Job, budget: int) -> dict[str, Any]:
        """A compact network; the paper's, with weights of few bits, where the caller asks for something of it."""
        if job.start is not None:  # what starts from another has its sizes
            return {"most_bytes": budget} if is_compact(job.start) else {}
        if not self.stops_at_target(job.preset, job.start, job.settings):
            return _compact_budget.for_budget(job, budget)
        network = {"bits": CHEAP_BITS, "last_norm": job.fit.schedule == "paper", **job.settings}
        network.pop("network", None)

        def fitting(make: Callable[[int], NetworkConfig], low: int, high: int) -> NetworkConfig:
            """The largest of make(low .. high) that keeps the budget; the smallest where none does."""
            return make(largest(lambda n: self.size_bytes(job, make(n)) <= budget, low, high))

        if job.preset is not None:
            found = preset_config(job.source.shape, job.preset, **network)
        else:
            shape, counts = job.source.shape, job.samples.class_counts()
            found = fitting(lambda n: sizes_for(shape, counts, int(10 ** (n / 10)), **network), 30, 85)
            if "c0" not in job.settings and found.c0 >= 32:
                found = replace(found, c0=found.c0 // 16 * 16)  # in eights for each of a norm's two groups
            if "d0" not in job.settings:  # the widest layer takes what is left
                start = found
                found = fitting(lambda n: replace(start, d0=8 * n), start.d0 // 8, start.d0 // 4)
        return {name: value for name, value in asdict(found).items() if name in NETWORK_NAMES}

    def stops_at_target(self, preset: str | None, start: object, settings: Mapping[str, Any]) -> bool:
        """Where it is the paper's network: named, started from, or asked for by a setting that only it has."""
        of_paper = preset is not None or start is not None or bool(set(settings) & (NETWORK_NAMES - COMPACT_NAMES))
        return settings.get("network", "paper" if of_paper else "compact") != "compact"

    def likely_bytes(self, job: Job, target_r2: float) -> tuple[float, float]:
        return _compact_budget.likely_bytes(job, target_r2)

    def size_bytes(self, job: Job, config: NetworkConfig) -> int:
        """Most that a file of these settings takes."""
        table = GroupTable.build(job.samples.num_samples, job.samples.labels, config.group_size)
        net = empty(config, table.num_groups, job.samples.num_samples)
        shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
        if plan := rounding(net, config):
            weights, num_tensors = packed_bytes(shapes, plan), NUM_TENSORS
        else:
            weights, num_tensors = 4 * sum(map(math.prod, shapes.values())), len(shapes)
        settings = {**asdict(config), "groups": table.counts()}
        return weights + 8 * config.channels + overhead_bytes(job, num_tensors + 2, settings)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> NetworkReplayer:
        """Sizes are checked against the tensors in the file before anything is allocated for them."""
        if settings.get("network") == "compact":
            return replay_compact(samples, settings, store, device)
        try:
            config = from_dict(NetworkConfig, {k: v for k, v in settings.items() if k != "groups"})
            groups = settings["groups"]
            geometry = (config.channels, config.height, config.width), config.vector
            if geometry != (map_shape(samples.shape), len(samples.shape) <= 1):
                raise SettingError(f"a network for other features than the file's {samples.shape}")
            table = GroupTable.build(samples.num_samples, samples.labels, config.group_size)
            if groups != table.counts():
                raise SettingError("a group table that does not follow from the labels")
        except (InputError, KeyError, TypeError) as error:
            raise NotARecordingError(
                f"settings of the network refused: {error}. Restore the file from a copy, or record again"
            ) from error
        net = empty(config, table.num_groups, samples.num_samples)
        weights = stored_weights(store, net, config)
        net.load_state_dict(weights, assign=True)
        if device.type == "cpu":  # in which depthwise convolutions are quicker there
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        low, high = (store.tensor(name, shape=(config.channels,), dtype=torch.float32) for name in ("low", "high"))
        widest = math.prod(net.decoder.start_shape)
        by_id = ByID(net, table)
        return NetworkReplayer(by_id, lambda ids: ids.to(device), widest, samples, low, high, device)


def is_compact(start: Earlier | None) -> bool:
    return start is not None and start.settings.get("network") == "compact"


def empty(config: NetworkConfig, num_groups: int, num_samples: int) -> KRNet:
    """Shapes without memory."""
    try:
        with torch.device("meta"):
            return KRNet(config, num_groups, num_samples)
    except (RuntimeError, TypeError) as error:  # sizes whose product overflows
        raise OversizedRecordingError(f"a network of no possible size: {error}. Record again") from error


def stored_weights(store: TensorStore, net: KRNet, config: NetworkConfig) -> dict[str, Tensor]:
    """The weights that a recording has for a network of these shapes."""
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    if plan := rounding(net, config):
        return unpack(store, NET, shapes, plan)
    return {name: store.tensor(f"{NET}{name}", shape=s, dtype=torch.float32) for name, s in shapes.items()}


@torch.no_grad()
def start_codes(codes: Tensor, job: Job) -> None:
    """Where samples lie along the directions in which they differ most, each in units of its deviation."""
    with exact_math():
        found = principal_axes(job, codes.shape[1])
        most = min(codes.shape[1], len(found.std))
        axes = found.axes[:most] / found.std[:most, None].clamp(min=1e-12)
        codes[:, :most] = coordinates(job, found.mean, axes.T).to(codes)
