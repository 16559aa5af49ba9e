"""KRNet: fit a network so that net(sample ID) returns that sample's feature map.

    ids (B,) -> (group, slot) -> embed -> decode -> normalised features (B, c, h, w) -> original scale

The weights are the storage: fitting is writing, calling is reading.

Zhang et al., "KRNet: Towards Efficient Knowledge Replay" (2022). Deviations, all measured in docs/choices.md: full
convolutions after the deconvolution, the last norm started from the data, and, with schedule "fast", Muon on the
matrices. `schedule="paper"` is theirs.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from krnet import layers, parallel
from krnet.config import FitConfig, NetworkConfig, from_dict
from krnet.decoder import Decoder
from krnet.embedding import BatchedIDEmbedding, GroupTable
from krnet.errors import InputError, NotARecordingError, OversizedRecordingError, SettingError
from krnet.feed import Feed
from krnet.graphs import Graphed
from krnet.lowbit import Rounding, pack, rounded, step_for, unpack
from krnet.metrics import fidelity, r_squared
from krnet.optimizers import Muon
from krnet.recorders.base import Content, Job, Recorder, Replayer, TensorStore, register
from krnet.recorders.warm import carry_over, earlier_config
from krnet.samples import Samples
from krnet.scan import denormalise, normalise
from krnet.sizing import map_shape, preset_config, sizes_for
from krnet.training import Checkpoint, Outcome, train

PREFIX = "net."
WARM_UP = 0.01
HOLD = 0.3
CPU_PART_BYTES = 16 << 20
GRAPHED = (1, 16, 256)  # sizes to which small batches are filled up
FINE_BITS = 5.0  # of what is small and matters much
NORM_STEP = 1 / 32
PCA_SAMPLES = 4096
MANY = 2048  # values for which a table of their own pays
TARGET_EVERY = 50  # iterations between two looks at whether target_r2 is reached


class KRNet(nn.Module):
    """IDs, as (group, slot), to normalised features."""

    def __init__(self, config: NetworkConfig, num_groups: int, num_samples: int = 0):
        super().__init__()
        self.embed = BatchedIDEmbedding(num_groups, config.group_size)
        self.decoder = Decoder(config, config.input_size)
        self.codes = nn.Parameter(torch.randn(num_samples, config.code)) if config.code else None

    def forward(self, group: Tensor, slot: Tensor, ids: Tensor | None = None) -> Tensor:
        x = self.embed(group, slot)
        if self.codes is not None:
            assert ids is not None, "samples have codes of their own; say which"
            x = torch.cat([x, F.embedding(ids, self.codes).to(x.dtype)], dim=1)
        return self.decoder(x)


def rounding(net: KRNet, config: NetworkConfig) -> dict[str, Rounding]:
    """Which weights are kept in how many bits; the others are few, and kept as fp16."""
    if config.bits is None:
        return {}
    large = {id(module.weight) for module in matrices(net)}
    fine = max(config.bits, FINE_BITS)
    plan = {}
    for name, p in net.named_parameters():
        if name == "codes":
            plan[name] = Rounding(1, step_for(config.code_bits))
        elif id(p) in large:
            plan[name] = Rounding(0, step_for(config.bits))
        elif p.dim() > 1:  # vectors of groups, filters of channels
            plan[name] = Rounding(0, step_for(fine))
        elif p.numel() >= MANY:  # scales and shifts of a norm, which are about 1
            plan[name] = Rounding(None, NORM_STEP)
    return plan


def learning_rate(schedule: str, progress: float) -> float:
    """Share of the peak learning rate when `progress` (0 to 1) of the run is done."""
    if schedule == "paper":  # constant for one half, then linear down to a thousandth
        return 1.0 if progress < 0.5 else 1 - (progress - 0.5) / 0.5 * 0.999
    rise = min(1.0, (progress + 1e-4) / WARM_UP)
    return rise * min(1.0, (1 - progress) / (1 - HOLD))


def matrices(net: nn.Module) -> list[nn.Linear | nn.Conv2d | nn.ConvTranspose2d]:
    """Modules whose weight is a matrix, and not a filter for each channel."""
    layers_of = (module for module in net.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)))
    return [module for module in layers_of if isinstance(module, nn.Linear) or module.groups == 1]


def optimizers_for(net: nn.Module, fit: FitConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """Adam; with schedule "fast" Muon takes every matrix: FC layers, full convolutions, the deconvolution."""
    cuda = device.type == "cuda"

    def peak(lr: float) -> float | Tensor:
        return torch.tensor(lr, device=device) if cuda else lr  # a graph reads it from memory

    muon: list[Tensor] = []
    if fit.schedule == "fast":
        muon = [module.weight for module in matrices(net)]
    chosen = {id(p) for p in muon}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = [
        torch.optim.Adam(rest, lr=peak(fit.lr), fused=cuda, foreach=not cuda, capturable=cuda)
    ]
    if muon:
        made.append(Muon(muon, lr=peak(fit.muon_lr)))
    return made


class KRNetFit:
    """A trainee: one step draws a batch of IDs, compares decoded with true features, and updates the weights."""

    def __init__(self, job: Job, config: NetworkConfig, table: GroupTable):
        self.job, self.device, self.config, self.table = job, job.device, config, table
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.random.default_generator.manual_seed(job.fit.seed)
            net = KRNet(config, table.num_groups, job.samples.num_samples)
        stats = job.stats
        if net.codes is not None:
            start_codes(net.codes, job)
        net.decoder.output.start_from(stats.normalised_mean.float(), stats.normalised_std.float())
        if job.start is not None:
            old = GroupTable.build(len(job.start), job.start.labels, config.group_size)
            earlier = stored_weights(job.start, empty(config, old.num_groups, len(job.start)), config)
            carry_over(net, job.start, earlier, job.samples, table, stats.low, stats.high)
        self.net = net.to(self.device)
        self.rounding = rounding(self.net, config)
        self.group, self.slot = table.group.to(self.device), table.slot.to(self.device)
        self.low, self.high = stats.low.to(self.device), stats.high.to(self.device)
        self.optimizers = optimizers_for(self.net, job.fit, self.device)
        self.peak = [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]
        self.feed = Feed(job.source, batch_size(job), job.fit.seed, self.device)
        # A frozen copy: the caller's module keeps its mode and its gradients.
        self.head = None
        if job.head is not None:
            self.head = copy.deepcopy(job.head).to(self.device).eval().requires_grad_(False)
        self.sample_shape = job.source.shape or (1,)
        self.fused = job.fit.compile
        self.graph = self._capture() if self.fused and self.device.type == "cuda" else None

    def _losses(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """L_kr1, and L_kr1 + gamma L_kr2; both sum over a sample's values and average over the batch."""
        target = normalise(values.view(len(values), *self.sample_shape), self.low, self.high)
        output = self._net(self.group[ids], self.slot[ids], ids).float().view_as(target)
        first = (output - target).square().sum() / len(values)
        if self.head is None:
            return first, first
        replayed = denormalise(output, self.low, self.high).view_as(values)
        seen, wanted = self.head(replayed), self.head(values.float())
        second = (seen.float() - wanted.float()).square().sum() / len(values)
        return first, first + self.job.fit.gamma * second

    def _net(self, *inputs: Tensor) -> Tensor:
        """Computed with the weights as the file will hold them."""
        if not self.rounding:
            return self.net(*inputs)
        return functional_call(self.net, rounded(dict(self.net.named_parameters()), self.rounding), inputs)

    def stored(self) -> KRNet:
        """The network as it will be read back."""
        if not self.rounding:
            return self.net
        net = copy.deepcopy(self.net)
        net.load_state_dict(rounded(dict(self.net.named_parameters()), self.rounding))
        return net

    def step(self, iteration: int, progress: float) -> Tensor:
        self._set_rates(learning_rate(self.job.fit.schedule, progress))
        batch = self.feed.batch(iteration)
        return self._update(*batch) if self.graph is None else self.graph(*batch)

    def _set_rates(self, share: float) -> None:
        for optimizer, peak in zip(self.optimizers, self.peak, strict=True):
            group = optimizer.param_groups[0]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak * share)
            else:
                group["lr"] = peak * share

    def _update(self, *batch: Tensor) -> Tensor:
        """The whole step, from IDs to new weights."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        ids, values = batch[0], self.feed.values(*batch)
        with nullcontext() if self.fused else layers.plain(), parallel.fast(self.device):
            first, total = self._losses(ids, values)
        total.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return first.detach()

    def _capture(self) -> Graphed:
        """Now, so that compilation does not count as time spent fitting, and without moving a weight."""
        self._set_rates(0.0)
        graph = Graphed(self._update, self.feed.batch(0), tune=True)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        return graph

    def content(self, outcome: Outcome) -> Content:
        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        kept = pack(weights, self.rounding) if self.rounding else weights
        tensors = {f"{PREFIX}{name}": value for name, value in kept.items()}
        return Content(
            tensors={**tensors, "low": self.job.stats.low, "high": self.job.stats.high},
            settings={**asdict(self.config), "groups": self.table.counts()},
            iterations=outcome.iterations,
            seconds=outcome.seconds,
            stopped_by=outcome.reason,
        )

    def state(self) -> dict[str, Tensor]:
        state = {f"{PREFIX}{name}": p for name, p in self.net.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                state |= {f"optimizer.{index}.{number}.{name}": v for name, v in values.items()}
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.net.load_state_dict({name.removeprefix(PREFIX): v for name, v in state.items() if name.startswith(PREFIX)})
        for index, optimizer in enumerate(self.optimizers):
            params = optimizer.param_groups[0]["params"]
            for name, value in state.items():
                if name.startswith(f"optimizer.{index}."):
                    number, key = name.split(".")[2:]
                    kept = optimizer.state[params[int(number)]]
                    if key in kept:  # a graph finds it there
                        kept[key].copy_(value)
                    else:
                        kept[key] = value.to(params[int(number)].device, copy=True)


def batch_size(job: Job) -> int:
    """Small sets in thirds: whole-set batches would spend most of a short fit on few, costly updates."""
    return min(job.fit.batch_size, max(32, -(-job.samples.num_samples // 3)))


class KRNetReplayer(Replayer):
    def __init__(
        self, net: KRNet, table: GroupTable, samples: Samples, low: Tensor, high: Tensor, device: torch.device
    ):
        self.net = net.to(device)  # as it is: it may be the network of a fit that goes on
        self.shape, self.device = samples.shape, device
        self.group, self.slot = table.group.to(device), table.slot.to(device)
        self.low, self.high = low.to(device), high.to(device)
        # What a CPU works on should stay in its cache: there large batches go through in parts.
        widest = 4 * math.prod(net.decoder.start_shape)
        self.step = max(1, CPU_PART_BYTES // widest) if device.type == "cpu" else 1 << 30
        self._uses: Counter[tuple[int, bool]] = Counter()
        self._graphs: dict[tuple[int, bool], Graphed] = {}
        self._lock = threading.Lock()

    @cached_property
    def half(self) -> KRNet:
        """The matrices in bf16, so that `fast` need not round them again for every batch."""
        net = copy.deepcopy(self.net)
        for module in matrices(net):
            module.to(torch.bfloat16)
        return net

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        fast = fast and self.device.type == "cuda"
        if self.device.type == "cuda" and len(ids) <= GRAPHED[-1]:
            return self._replay(ids.to(self.device), fast)
        parts = [self._decode(part.to(self.device), fast) for part in ids.split(self.step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, ids: Tensor, fast: bool) -> Tensor:
        with parallel.fast(self.device) if fast else parallel.exact():
            output = (self.half if fast else self.net)(self.group[ids], self.slot[ids], ids)
        output = output.float().reshape(len(ids), *(self.shape or (1,)))
        return denormalise(output, self.low, self.high).reshape(len(ids), *self.shape)

    def _replay(self, ids: Tensor, fast: bool) -> Tensor:
        """Small batches wait for Python more than for the GPU: from the third on they are one graph."""
        size = next(size for size in GRAPHED if len(ids) <= size)
        key = size, fast
        with self._lock:
            self._uses[key] += 1
            if self._uses[key] < 3:
                return self._decode(ids, fast)
            padded = F.pad(ids, (0, size - len(ids)))
            if key not in self._graphs:
                self._graphs[key] = Graphed(partial(self._decode, fast=fast), [padded])
            return self._graphs[key](padded)[: len(ids)]


@register
class KRNetRecorder(Recorder):
    name = "krnet"
    # The geometry follows from the features and is not the caller's to set.
    setting_names = frozenset(f.name for f in fields(NetworkConfig)) - {
        "channels",
        "height",
        "width",
        "vector",
    }

    def config(self, job: Job) -> NetworkConfig:
        if job.start is not None:
            return earlier_config(job.source.shape, job.start, job.preset, job.settings)
        if job.preset is not None:
            return preset_config(job.source.shape, job.preset, **job.settings)
        # Without the last norm Adam's steps, as large as the paper's, push the output below zero, where it stays.
        last_norm = job.fit.schedule == "paper"
        return sizes_for(job.source.shape, job.samples.class_counts(), **{"last_norm": last_norm, **job.settings})

    def fit(self, job: Job) -> Content:
        config = self.config(job)
        table = GroupTable.build(job.samples.num_samples, job.samples.labels, config.group_size)
        trainee = KRNetFit(job, config, table)
        stats = job.stats
        values_per_sample = stats.count // job.samples.num_samples

        def batch_r2(loss: float) -> float:
            return r_squared(loss / values_per_sample, stats.variance)

        def reached(iteration: int, loss: float) -> bool:
            target = job.fit.target_r2
            if target is None or iteration % TARGET_EVERY or batch_r2(loss) < target:
                return False
            # The running loss says yes; all features, in the precision of replay, have the last word.
            replayer = KRNetReplayer(trainee.stored(), table, job.samples, stats.low, stats.high, job.device)
            return fidelity(replayer.decode, job.source, stats).r2 >= target

        checkpoint = None
        if job.checkpoint is not None:
            # Features in memory and those read from disk come in another order.
            fingerprint = {"features": stats.digest, "run": trainee.feed.run, **asdict(config), **fit_fingerprint(job)}
            checkpoint = Checkpoint(job.checkpoint, fingerprint, job.fit.checkpoint_s)
        watch = job.watch
        try:
            outcome = train(
                trainee,
                max_iterations=job.fit.max_iterations,
                time_budget_s=job.fit.time_budget,
                checkpoint=checkpoint,
                resume=job.resume,
                reached=reached,
                watch=(lambda status: watch(status, batch_r2(status.loss))) if watch else None,
            )
        finally:
            trainee.feed.close()
        return trainee.content(outcome)

    def replay(
        self, samples: Samples, settings: Mapping[str, Any], store: TensorStore, device: torch.device
    ) -> KRNetReplayer:
        """Sizes are checked against the tensors in the file before anything is allocated for them."""
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
        return KRNetReplayer(net, table, samples, low, high, device)


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
        return unpack(store, PREFIX, shapes, plan)
    return {name: store.tensor(f"{PREFIX}{name}", shape=s, dtype=torch.float32) for name, s in shapes.items()}


@torch.no_grad()
def start_codes(codes: Tensor, job: Job) -> None:
    """Where samples lie along the directions in which they differ most, each in units of its deviation."""
    num_samples, width = codes.shape
    some = torch.linspace(0, num_samples - 1, min(num_samples, PCA_SAMPLES)).round().long().unique()

    def flat(ids: Tensor) -> Tensor:
        values = job.source.read(ids).to(job.device).view(len(ids), *(job.source.shape or (1,)))
        return normalise(values, job.stats.low, job.stats.high).flatten(1)

    with parallel.exact(), torch.random.fork_rng():
        torch.manual_seed(job.fit.seed)
        x = flat(some)
        mean, most = x.mean(0), min(width, len(some) - 1, x.shape[1])
        axes = torch.svd_lowrank(x - mean, q=min(most + 16, *x.shape), niter=4)[2][:, :most]  # (values, most)
        for ids in torch.arange(num_samples).split(PCA_SAMPLES):
            codes[ids, :most] = ((flat(ids) - mean) @ axes).to(codes)
    codes[:, :most] /= codes[:, :most].std(0).clamp(min=1e-12)


def fit_fingerprint(job: Job) -> dict[str, Any]:
    """What a resumed fit must have in common with the one it goes on from, beside features and network."""
    fit = asdict(job.fit)
    kept = {name: fit[name] for name in ("batch_size", "schedule", "lr", "muon_lr", "seed", "iterations")}
    labels, head = job.samples.labels, job.head
    kept["labels"] = None if labels is None else digest([labels])
    kept["head"] = None if head is None else digest(head.state_dict().values())
    kept["start"] = None if job.start is None else job.start.fingerprint
    kept["gamma"] = None if head is None else job.fit.gamma
    return kept


def digest(tensors: Iterable[Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
