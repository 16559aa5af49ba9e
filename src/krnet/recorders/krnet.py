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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn

from krnet import parallel
from krnet.config import FitConfig, NetworkConfig, from_dict
from krnet.decoder import Decoder
from krnet.embedding import BatchedIDEmbedding, GroupTable
from krnet.errors import InputError, NotARecordingError, OversizedRecordingError, SettingError
from krnet.feed import Feed
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
TARGET_EVERY = 50  # iterations between two looks at whether target_r2 is reached


class KRNet(nn.Module):
    """IDs, as (group, slot), to normalised features."""

    def __init__(self, config: NetworkConfig, num_groups: int):
        super().__init__()
        self.embed = BatchedIDEmbedding(num_groups, config.group_size)
        self.decoder = Decoder(config, 2 * config.group_size)

    def forward(self, group: Tensor, slot: Tensor) -> Tensor:
        return self.decoder(self.embed(group, slot))


def learning_rate(schedule: str, progress: float) -> float:
    """Share of the peak learning rate when `progress` (0 to 1) of the run is done."""
    if schedule == "paper":  # constant for one half, then linear down to a thousandth
        return 1.0 if progress < 0.5 else 1 - (progress - 0.5) / 0.5 * 0.999
    rise = min(1.0, (progress + 1e-4) / WARM_UP)
    return rise * min(1.0, (1 - progress) / (1 - HOLD))


def optimizers_for(net: nn.Module, fit: FitConfig, cuda: bool) -> list[torch.optim.Optimizer]:
    """Adam; with schedule "fast" Muon takes every matrix: FC layers, full convolutions, the deconvolution."""
    muon: list[Tensor] = []
    if fit.schedule == "fast":
        for module in net.modules():
            depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) and not depthwise:
                muon.append(module.weight)
    chosen = {id(p) for p in muon}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=fit.lr, fused=cuda, foreach=not cuda)]
    if muon:
        made.append(Muon(muon, lr=fit.muon_lr))
    return made


class KRNetFit:
    """A trainee: one step draws a batch of IDs, compares decoded with true features, and updates the weights."""

    def __init__(self, job: Job, config: NetworkConfig, table: GroupTable):
        self.job, self.device, self.config, self.table = job, job.device, config, table
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.random.default_generator.manual_seed(job.fit.seed)
            net = KRNet(config, table.num_groups)
        stats = job.stats
        net.decoder.output.start_from(stats.normalised_mean.float(), stats.normalised_std.float())
        if job.start is not None:
            carry_over(net, job.start, job.samples, table, stats.low, stats.high)
        self.net = net.to(self.device)
        self.group, self.slot = table.group.to(self.device), table.slot.to(self.device)
        self.low, self.high = stats.low.to(self.device), stats.high.to(self.device)
        cuda = self.device.type == "cuda"
        self.optimizers = optimizers_for(self.net, job.fit, cuda)
        self.peak = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        self.feed = Feed(job.source, batch_size(job), job.fit.seed, self.device)
        # A frozen copy: the caller's module keeps its mode and its gradients.
        self.head = None
        if job.head is not None:
            self.head = copy.deepcopy(job.head).to(self.device).eval().requires_grad_(False)
        self.sample_shape = job.source.shape or (1,)
        self.losses = self._losses
        if cuda and job.fit.compile:
            self.losses = torch.compile(self._losses)
            self._backward(0)  # compiles now, so that it does not count as time spent fitting

    def _losses(self, group: Tensor, slot: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """L_kr1, and L_kr1 + gamma L_kr2; both sum over a sample's values and average over the batch."""
        target = normalise(values.view(len(values), *self.sample_shape), self.low, self.high)
        output = self.net(group, slot).float().view_as(target)
        first = (output - target).square().sum() / len(values)
        if self.head is None:
            return first, first
        replayed = denormalise(output, self.low, self.high).view_as(values)
        seen, wanted = self.head(replayed), self.head(values.float())
        second = (seen.float() - wanted.float()).square().sum() / len(values)
        return first, first + self.job.fit.gamma * second

    def step(self, iteration: int, progress: float) -> Tensor:
        share = learning_rate(self.job.fit.schedule, progress)
        for optimizer, peak in zip(self.optimizers, self.peak, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.zero_grad(set_to_none=True)
        first = self._backward(iteration)
        for optimizer in self.optimizers:
            optimizer.step()
        return first

    def _backward(self, iteration: int) -> Tensor:
        ids, values = self.feed.batch(iteration)
        with parallel.fast(self.device):
            first, total = self.losses(self.group[ids], self.slot[ids], values)
        total.backward()
        return first.detach()

    def content(self, outcome: Outcome) -> Content:
        weights = {f"{PREFIX}{name}": p.detach() for name, p in self.net.state_dict().items()}
        return Content(
            tensors={**weights, "low": self.job.stats.low, "high": self.job.stats.high},
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
            whole = optimizer.state_dict()
            prefix = f"optimizer.{index}."
            for name, value in state.items():
                if name.startswith(prefix):
                    number, key = name.removeprefix(prefix).split(".")
                    whole["state"].setdefault(int(number), {})[key] = value
            optimizer.load_state_dict(whole)


def batch_size(job: Job) -> int:
    """Small sets in thirds: whole-set batches would spend most of a short fit on few, costly updates."""
    return min(job.fit.batch_size, max(32, -(-job.samples.num_samples // 3)))


class KRNetReplayer(Replayer):
    def __init__(
        self, net: KRNet, table: GroupTable, samples: Samples, low: Tensor, high: Tensor, device: torch.device
    ):
        self.net = net.to(device)  # as it is: it may be the network of a fit that goes on
        self.table, self.shape, self.device = table, samples.shape, device
        self.low, self.high = low.to(device), high.to(device)
        # What a CPU works on should stay in its cache: there large batches go through in parts.
        widest = 4 * math.prod(net.decoder.start_shape)
        self.step = max(1, CPU_PART_BYTES // widest) if device.type == "cpu" else 1 << 30

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        parts = [self._decode(part, fast) for part in ids.split(self.step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, ids: Tensor, fast: bool) -> Tensor:
        group, slot = self.table.group[ids].to(self.device), self.table.slot[ids].to(self.device)
        with parallel.fast(self.device) if fast else parallel.exact():
            output = self.net(group, slot)
        output = output.float().reshape(len(ids), *(self.shape or (1,)))
        return denormalise(output, self.low, self.high).reshape(len(ids), *self.shape)


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
            replayer = KRNetReplayer(trainee.net, table, job.samples, stats.low, stats.high, job.device)
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
        try:
            with torch.device("meta"):
                net = KRNet(config, table.num_groups)
        except (RuntimeError, TypeError) as error:  # sizes whose product overflows
            raise OversizedRecordingError(f"a network of no possible size: {error}. Record again") from error
        weights = {
            name: store.tensor(f"{PREFIX}{name}", shape=p.shape, dtype=torch.float32)
            for name, p in net.state_dict().items()
        }
        net.load_state_dict(weights, assign=True)
        if device.type == "cpu":  # in which depthwise convolutions are quicker there
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        low, high = (store.tensor(name, shape=(config.channels,), dtype=torch.float32) for name in ("low", "high"))
        return KRNetReplayer(net, table, samples, low, high, device)


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
