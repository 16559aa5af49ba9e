"""What recorders that fit a network have in common: the trainee, the run with all its ways to end, the replayer.

    ids -> Feed -> values -> NetworkFit.outputs -> loss -> new weights      the whole step is one graph on a GPU
    NetworkFit -> run_fit -> Outcome                                         checkpoints, target_r2, time, watcher
    ids -> NetworkReplayer.inputs -> network -> original scale -> features   small batches are graphs, too

A recorder brings its network, and what that network is given for a batch of IDs.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from krnet.coding.weights import PACKED_TENSORS, Rounding, matrices, packed_bytes
from krnet.device import Graphed, exact_math, fast_math, free_bytes
from krnet.features.feed import Feed
from krnet.features.metrics import fidelity, r_squared
from krnet.features.samples import Samples
from krnet.features.stats import denormalise, normalise
from krnet.nn import layers
from krnet.nn.muon import Muon
from krnet.recorders.base import Content, Job, Recorder, Replayer, Stored
from krnet.train.config import FitConfig
from krnet.train.loop import Checkpoint, Outcome, train

NET = "net."
WARM_UP, HOLD = 0.01, 0.3  # shares of a fit
CPU_PART_BYTES = 16 << 20
GRAPHED = (1, 16, 256)  # sizes to which small batches are filled up
TARGET_EVERY = 50  # iterations between two looks at whether target_r2 is reached
SEEN_SAMPLES = 4096  # shown to the head at a time, before the fit


def learning_rate(schedule: str, progress: float) -> float:
    """Share of the peak learning rate when `progress` (0 to 1) of the run is done."""
    if schedule == "paper":  # constant for one half, then linear down to a thousandth
        return 1.0 if progress < 0.5 else 1 - (progress - 0.5) / 0.5 * 0.999
    rise = min(1.0, (progress + 1e-4) / WARM_UP)
    return rise * min(1.0, (1 - progress) / (1 - HOLD))


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


def batch_size(job: Job) -> int:
    """Small sets in thirds: whole-set batches would spend most of a short fit on few, costly updates."""
    return min(job.fit.batch_size, max(32, -(-job.samples.num_samples // 3)))


def stored_packed(prefix: str, net: nn.Module, plan: Mapping[str, Rounding]) -> dict[str, Stored]:
    """The tensors that `coding.weights.pack` makes of a network; the bound of all of them stands at the stream."""
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    found = {name: Stored() for name in PACKED_TENSORS}
    num_weights = sum(map(math.prod, shapes.values()))
    found["stream"] = Stored(dtype=torch.uint8, most_bytes=packed_bytes(shapes, plan), num_decoded=num_weights)
    return {prefix + name: tensor for name, tensor in found.items()}


def stored_weights(prefix: str, net: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Stored]:
    """The weights of a network as they are."""
    return {prefix + name: Stored(tuple(p.shape), dtype) for name, p in net.named_parameters()}


class NetworkFit(ABC):
    """A trainee: one step draws a batch of IDs, compares decoded with true features, and updates the weights."""

    def __init__(self, job: Job, make: Callable[[], nn.Module]):
        self.job, self.device = job, job.device
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.random.default_generator.manual_seed(job.fit.seed)
            net = make()
        self.net = net.to(self.device)
        self.low, self.high = job.stats.low.to(self.device), job.stats.high.to(self.device)
        self.optimizers = self.make_optimizers()
        self.peak = [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]
        self.feed = Feed(job.source, batch_size(job), job.fit.seed, self.device)
        # A frozen copy: the caller's module keeps its mode and its gradients.
        self.head = None
        if job.head is not None:
            with torch.no_grad():  # copies of TorchScript's parameters would remember where they come from
                self.head = copy.deepcopy(job.head).to(self.device).eval().requires_grad_(False)
        self.seen = self._seen()
        self.sample_shape = job.source.shape or (1,)
        self.fused = job.fit.compile
        self.graph = self.capture() if self.fused and self.device.type == "cuda" else None

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers_for(self.net, self.job.fit, self.device)

    def after_step(self, ids: Tensor) -> None:  # noqa: B027  most have none
        """After the optimizers: whatever else a step changes."""

    @torch.no_grad()
    def _seen(self) -> Tensor | None:
        """What the head makes of every sample (N, ...), where a GPU has room for it: found once, not in each step."""
        if self.head is None or self.device.type != "cuda":
            return None
        found: Tensor | None = None
        with fast_math(self.device):
            for ids in torch.arange(len(self.job.source)).split(SEEN_SAMPLES):
                part = self.head(self.job.source.read(ids).to(self.device).float()).float()
                if found is None:
                    if 4 * part[0].numel() * len(self.job.source) > free_bytes(self.device) // 4:
                        return None
                    found = part.new_empty(len(self.job.source), *part.shape[1:])
                found[ids[0] : ids[-1] + 1] = part
        return found

    @abstractmethod
    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """What the network replays for these IDs, given their normalised features (B, *shape)."""

    @abstractmethod
    def content(self, outcome: Outcome) -> Content:
        """What the file holds if the fit ends here."""

    def _losses(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """L_kr1, and L_kr1 + gamma L_kr2; both sum over a sample's values and average over samples."""
        target = normalise(values.view(len(values), *self.sample_shape), self.low, self.high)
        output = self.outputs(ids, target).float().view_as(target)
        first = (output - target).square().sum() / len(values)
        if self.head is None:
            return first, first
        # Samples come in random order: the first of them stand for all.
        shown = slice(self.job.fit.num_head_samples(len(values)))
        replayed = denormalise(output[shown], self.low, self.high).view_as(values[shown])
        seen = self.head(replayed)
        wanted = self.head(values[shown].float()) if self.seen is None else self.seen.index_select(0, ids[shown])
        second = (seen.float() - wanted.float()).square().sum() / len(seen)
        return first, first + self.job.fit.gamma * second

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
        with nullcontext() if self.fused else layers.plain(), fast_math(self.device):
            first, total = self._losses(ids, values)
        total.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.after_step(ids)
        return first.detach()

    def capture(self) -> Graphed:
        """Now, so that compilation does not count as time spent fitting, and without moving a weight."""
        self._set_rates(0.0)
        graph = Graphed(self._update, self.feed.batch(0), tune=True)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        return graph

    def state(self) -> dict[str, Tensor]:
        state = {f"{NET}{name}": p for name, p in self.net.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                state |= {f"optimizer.{index}.{number}.{name}": v for name, v in values.items()}
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.net.load_state_dict({name.removeprefix(NET): v for name, v in state.items() if name.startswith(NET)})
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


def run_fit(recorder: Recorder, trainee: NetworkFit, settings: Mapping[str, Any]) -> Content:
    """Train to the end that the job asks for. A checkpoint is taken up again only under the same `settings`."""
    job, stats = trainee.job, trainee.job.stats
    values_per_sample = stats.count // job.samples.num_samples

    def batch_r2(loss: float) -> float:
        return r_squared(loss / values_per_sample, stats.variance)

    def reached(iteration: int, loss: float) -> bool:
        target = job.fit.target_r2
        if target is None or iteration % TARGET_EVERY or batch_r2(loss) < target:
            return False
        # The running loss says yes; all features, as they would be stored and replayed, have the last word.
        content = trainee.content(Outcome(iteration, 0.0, "target"))
        replayer = recorder.replay(job.samples, content.settings, content, job.device)
        return fidelity(replayer.decode, job.source, stats).r2 >= target

    checkpoint = None
    if job.checkpoint is not None:
        # Features in memory and those read from disk come in another order.
        fingerprint = {"features": stats.digest, "run": trainee.feed.run, **settings, **fit_fingerprint(job)}
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


class NetworkReplayer(Replayer):
    def __init__(
        self,
        net: nn.Module,
        inputs: Callable[[Tensor], Tensor],
        widest: int,
        samples: Samples,
        low: Tensor,
        high: Tensor,
        device: torch.device,
    ):
        """inputs: IDs on the CPU -> what the network takes, on the device; widest: values of its largest map."""
        self.net, self.inputs = net.to(device), inputs
        self.shape, self.device = samples.shape, device
        self.low, self.high = low.to(device), high.to(device)
        # What a CPU works on should stay in its cache: there large batches go through in parts.
        self.step = max(1, CPU_PART_BYTES // (4 * widest)) if device.type == "cpu" else 1 << 30
        self._uses: Counter[tuple[int, bool]] = Counter()
        self._graphs: dict[tuple[int, bool], Graphed] = {}
        self._lock = threading.Lock()

    @cached_property
    def half(self) -> nn.Module:
        """The matrices in bf16, so that `fast` need not round them again for every batch."""
        net = copy.deepcopy(self.net)
        for module in matrices(net):
            module.to(torch.bfloat16)
        return net

    @torch.inference_mode()
    def decode(self, ids: Tensor, *, fast: bool = False) -> Tensor:
        fast = fast and self.device.type == "cuda"
        if self.device.type == "cuda" and len(ids) <= GRAPHED[-1]:
            return self._replay(self.inputs(ids), fast)
        parts = [self._decode(self.inputs(part), fast) for part in ids.split(self.step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, inputs: Tensor, fast: bool) -> Tensor:
        with fast_math(self.device) if fast else exact_math():
            output = (self.half if fast else self.net)(inputs)
        output = output.float().reshape(len(inputs), *(self.shape or (1,)))
        return denormalise(output, self.low, self.high).reshape(len(inputs), *self.shape)

    def _replay(self, inputs: Tensor, fast: bool) -> Tensor:
        """Small batches wait for Python more than for the GPU: from the third on they are one graph."""
        size = next(size for size in GRAPHED if len(inputs) <= size)
        key = size, fast
        with self._lock:
            self._uses[key] += 1
            if self._uses[key] < 3:
                return self._decode(inputs, fast)
            padding = [0, 0] * (inputs.dim() - 1) + [0, size - len(inputs)]
            padded = F.pad(inputs, padding)
            if key not in self._graphs:
                self._graphs[key] = Graphed(partial(self._decode, fast=fast), [padded])
            return self._graphs[key](padded)[: len(inputs)]


def fit_fingerprint(job: Job) -> dict[str, Any]:
    """What a resumed fit must have in common with the one it goes on from, beside features and network."""
    fit = asdict(job.fit)
    kept = {name: fit[name] for name in ("batch_size", "schedule", "lr", "muon_lr", "seed", "iterations")}
    labels, head = job.samples.labels, job.head
    kept["labels"] = None if labels is None else digest([labels])
    kept["head"] = None if head is None else digest(head.state_dict().values())
    kept["start"] = None if job.start is None else job.start.fingerprint
    kept["gamma"] = None if head is None else job.fit.gamma
    kept["shown"] = None if head is None else job.fit.num_head_samples(job.fit.batch_size)
    return kept


def digest(tensors: Iterable[Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
