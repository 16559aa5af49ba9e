"""Shared by recorders that train a network: the training step, and the run around it.

    ids -> Feed -> values -> NetworkFit.outputs -> loss -> new weights       on a GPU each step is one CUDA graph
    NetworkFit -> run_fit -> Content                                         checkpoints, R2 or time to stop at, watcher

A recorder supplies its network, and the network's inputs for a batch of IDs.
"""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from krnet.coding.weights import matrices
from krnet.device import Graphed, fast_math, free_bytes
from krnet.features.feed import Feed
from krnet.features.metrics import fidelity, r_squared
from krnet.features.stats import check_unchanged, denormalise, normalise
from krnet.nn import layers
from krnet.nn.muon import Muon
from krnet.progress import Progress
from krnet.recorders.base import Content, Job, Recorder
from krnet.recorders.network_sizes import NET
from krnet.team import team
from krnet.train.config import BATCH_SAMPLES, FitConfig
from krnet.train.loop import LOSS_CHECK_ITERATIONS, Checkpoint, Outcome, train
from krnet.train.open_end import OpenEnd

MIN_BATCH_SAMPLES = 4  # of the largest samples: the gradient of one or two alone says little
WARM_UP_SHARE, HOLD_SHARE = 0.01, 0.3  # shares of a fit: the learning rate rises during the one, falls after the other
OPEN_FIT_S = 300.0  # the most seconds that a fit of open length takes
FIRST_ROUND_EPOCHS, FIRST_ROUND_ITERATIONS = 2, 100  # its first round is as long as the longer of the two
TARGET_EVERY = 50  # iterations between two checks of stop_at_r2
HEAD_CHUNK_SAMPLES = 4096  # samples that the head takes at once, before the fit


def learning_rate(schedule: str, progress: float) -> float:
    """The learning rate as a share of its peak, when the share `progress` (0 to 1) of the run is done."""
    if schedule == "paper":  # constant for one half, then linear down to a thousandth
        return 1.0 if progress < 0.5 else 1 - (progress - 0.5) / 0.5 * 0.999
    warm_up = min(1.0, (progress + 1e-4) / WARM_UP_SHARE)
    return warm_up * min(1.0, (1 - progress) / (1 - HOLD_SHARE))


def is_open(fit: FitConfig, device: torch.device) -> bool:
    """Whether the settings leave open how long a fit is. On a GPU the schedule's number of iterations takes minutes."""
    return fit.iterations is None and fit.time_budget is None and device.type == "cpu"


def first_round(feed: Feed) -> int:
    """Iterations of the first round of a fit of open length."""
    iterations = max(FIRST_ROUND_ITERATIONS, FIRST_ROUND_EPOCHS * feed.num_samples / feed.batch_size)
    return LOSS_CHECK_ITERATIONS * math.ceil(iterations / LOSS_CHECK_ITERATIONS)


def optimizers_for(net: nn.Module, fit: FitConfig, device: torch.device) -> list[torch.optim.Optimizer]:
    """Adam for all weights; with schedule "fast", Muon for the matrices: FC layers, full (de)convolutions."""
    cuda = device.type == "cuda"

    def peak(lr: float) -> float | Tensor:
        return torch.tensor(lr, device=device) if cuda else lr  # a CUDA graph reads it from device memory

    muon_weights: list[Tensor] = []
    if fit.schedule == "fast":
        muon_weights = [module.weight for module in matrices(net)]
    muon_ids = {id(p) for p in muon_weights}
    adam_weights = [p for p in net.parameters() if id(p) not in muon_ids]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(adam_weights, lr=peak(fit.lr), fused=cuda, foreach=not cuda, capturable=cuda)
    ]
    if muon_weights:
        optimizers.append(Muon(muon_weights, lr=peak(fit.muon_lr)))
    return optimizers


def wanted_batch_size(job: Job, most_values: int | None = None) -> int:
    """Samples of a batch: the number that the caller gives, else at most BATCH_SAMPLES, of most_values in all."""
    if job.fit.batch_size is not None or most_values is None:
        return job.fit.batch_size or BATCH_SAMPLES
    return min(BATCH_SAMPLES, max(MIN_BATCH_SAMPLES, most_values // math.prod(job.samples.shape)))


def batch_size(job: Job, most_values: int | None = None) -> int:
    """At most a third of the samples: batches of all of them would make updates few and costly in a short fit."""
    return min(wanted_batch_size(job, most_values), max(32, -(-job.samples.num_samples // 3)))


class NetworkFit(ABC):
    """The trainee of train.loop: a step replays a batch of IDs, compares it with the features, updates the weights."""

    batch_values: ClassVar[Mapping[str, int]] = {}
    """By type of device, the values of a batch at most, if the caller does not say how many samples it has."""
    ends_by_itself: ClassVar[bool] = False
    """On a CPU, a fit of open length ends when it no longer pays, or after OPEN_FIT_S."""
    least_warm_up: ClassVar[int] = 1
    """Iterations in which the learning rate of a fit by the clock rises, at least."""

    def __init__(self, job: Job, make: Callable[[], nn.Module]):
        self.job, self.device, self.team = job, job.device, team()
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.random.default_generator.manual_seed(job.fit.seed)
            net = make()
        self.net = net.to(self.device)
        self.low, self.high = job.stats.low.to(self.device), job.stats.high.to(self.device)
        self.optimizers = self.make_optimizers()
        self.peak_lrs = [float(optimizer.param_groups[0]["lr"]) for optimizer in self.optimizers]
        most_values = self.batch_values.get(self.device.type)
        self.wanted_batch_size = wanted_batch_size(job, most_values)
        self.is_open = self.ends_by_itself and is_open(job.fit, job.device)
        self.by_clock = self.is_open or job.fit.time_budget is not None
        self.feed = Feed(job.source, batch_size(job, most_values), job.fit.seed, self.device)
        # A frozen copy, so that the caller's module keeps its mode and its gradients.
        self.head = None
        if job.head is not None:
            with torch.no_grad():  # otherwise copied TorchScript parameters carry a gradient history
                self.head = copy.deepcopy(job.head).to(self.device).eval().requires_grad_(False)
        self.head_targets = self._compute_head_targets()
        self.sample_shape = job.source.shape or (1,)
        self.fused = job.fit.compile
        captures = self.fused and self.device.type == "cuda" and self.team.count == 1
        self.graph = self.capture() if captures else None

    def make_optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers_for(self.net, self.job.fit, self.device)

    def after_step(self, ids: Tensor) -> None:  # noqa: B027  most have none
        """Called after the optimizers: changes whatever they do not."""

    @torch.no_grad()
    def _compute_head_targets(self) -> Tensor | None:
        """The head's outputs for all samples (N, ...), computed once instead of in each step.

        None on a CPU, or where they would take more than a quarter of the GPU's free memory.
        """
        if self.head is None or self.device.type != "cuda":
            return None
        targets: Tensor | None = None  # (N, ...)
        with fast_math(self.device):
            for ids in torch.arange(len(self.job.source)).split(HEAD_CHUNK_SAMPLES):
                part = self.head(self.job.source.read(ids).to(self.device).float()).float()
                if targets is None:
                    if 4 * part[0].numel() * len(self.job.source) > free_bytes(self.device) // 4:
                        return None
                    targets = part.new_empty(len(self.job.source), *part.shape[1:])
                targets[ids[0] : ids[-1] + 1] = part
        return targets

    @abstractmethod
    def outputs(self, ids: Tensor, target: Tensor) -> Tensor:
        """The network's replays of these IDs. `target` (B, *shape) are their normalised features."""

    @abstractmethod
    def content(self, outcome: Outcome) -> Content:
        """What the file would hold if the fit ended now."""

    def _losses(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """L_kr1, and L_kr1 + gamma L_kr2; both sum over a sample's values and average over samples.

        Of several processes each has the part of its own samples, whose `values` it has; the sum is the whole loss.
        """
        own = ids[self.team.own()]
        target = normalise(values.view(len(values), *self.sample_shape), self.low, self.high)  # (B, *shape)
        output = self.outputs(own, target).float().view_as(target)
        feature_loss = (output - target).square().sum() / len(ids)
        num_head_samples = self.job.fit.num_head_samples(len(ids))
        part = slice(self.team.num_own(num_head_samples))
        if self.head is None or not len(own[part]):
            return feature_loss, feature_loss
        # A batch is in random order, so its first samples are a random choice.
        replayed = denormalise(output[part], self.low, self.high).view_as(values[part])
        head_outputs = self.head(replayed)
        head_targets = (
            self.head(values[part].float())
            if self.head_targets is None
            else self.head_targets.index_select(0, own[part])
        )
        head_loss = (head_outputs.float() - head_targets.float()).square().sum() / num_head_samples
        return feature_loss, feature_loss + self.job.fit.gamma * head_loss

    def step(self, iteration: int, progress: float) -> Tensor:
        share = learning_rate(self.job.fit.schedule, progress)
        if self.by_clock:
            share *= min(1.0, (iteration + 1) / self.least_warm_up)
        self._set_rates(share)
        batch = self.feed.batch(iteration)
        return self._update(*batch) if self.graph is None else self.graph(*batch)

    def _set_rates(self, lr_share: float) -> None:
        """Set each learning rate to `lr_share` of its peak."""
        for optimizer, peak_lr in zip(self.optimizers, self.peak_lrs, strict=True):
            group = optimizer.param_groups[0]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(peak_lr * lr_share)
            else:
                group["lr"] = peak_lr * lr_share

    def _update(self, *batch: Tensor) -> Tensor:
        """The whole step, from IDs to new weights; returns L_kr1."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        ids, values = batch[0], self.feed.values(*batch)
        with nullcontext() if self.fused else layers.plain(), fast_math(self.device):
            feature_loss, total_loss = self._losses(ids, values)
        total_loss.backward()
        feature_loss = feature_loss.detach()
        self.team.add([*self.gradients(), feature_loss])
        for optimizer in self.optimizers:
            optimizer.step()
        self.after_step(ids)
        return feature_loss

    def gradients(self) -> list[Tensor]:
        """What several processes add up."""
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def capture(self) -> Graphed:
        """Record the step as a CUDA graph.

        Done before the fit, so that compilation does not count as fitting time. Capturing runs the step: with learning
        rates of 0 no weight moves, and the optimizers' moments are set back to 0 afterwards.
        """
        self._set_rates(0.0)
        graph = Graphed(self._update, self.feed.batch(0), tune=True)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        return graph

    def decoder(self, recorder: Recorder, content: Content) -> Callable[[Tensor], Tensor]:
        """Replays of the samples of this fit's job, from the file's content: ids (B,) -> features (B, *shape)."""
        return recorder.replay(self.job.samples, content.settings, content, self.device).decode

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
                    param_state = optimizer.state[params[int(number)]]
                    if key in param_state:  # in place: a CUDA graph reads this very tensor
                        param_state[key].copy_(value)
                    else:
                        param_state[key] = value.to(params[int(number)].device, copy=True)


def run_fit(recorder: Recorder, trainee: NetworkFit, settings: Mapping[str, Any]) -> Content:
    """Train until iterations, time or stop_at_r2 ends it. A checkpoint is resumed only under the same `settings`."""
    job, stats = trainee.job, trainee.job.stats
    values_per_sample = stats.count // job.samples.num_samples

    def batch_r2(loss: float) -> float:
        return r_squared(loss / values_per_sample, stats.variance)

    def add_r2(progress: Progress) -> Progress:
        return replace(progress, values={"R2": batch_r2(progress.values["loss"]), **progress.values})

    def reached(iteration: int, loss: float) -> bool:
        target = job.fit.stop_at_r2
        if target is None or iteration % TARGET_EVERY or batch_r2(loss) < target:
            return False
        # The running loss is an estimate: measure R2 on all features, as they would be stored and replayed.
        content = trainee.content(Outcome(iteration, 0.0, "target"))
        r2 = fidelity(trainee.decoder(recorder, content), job.source, stats).r2
        return bool(trainee.team.largest(r2 >= target)[0])

    open_end = OpenEnd(first_round(trainee.feed), OPEN_FIT_S) if trainee.is_open else None
    checkpoint = None
    if job.checkpoint is not None:
        # Feed.run is part of it: features read from disk come in another order than those in memory.
        # The budget comes first: other settings follow from it, and the error names the first that differs.
        budget = {"budget": settings["most_bytes"]} if settings.get("most_bytes") else {}
        fingerprint = {"features": stats.digest, **budget, "run": trainee.feed.run, **settings}
        fingerprint |= fit_fingerprint(job, trainee.wanted_batch_size)
        fingerprint |= {} if open_end is None else {"time_limit": OPEN_FIT_S}
        check_inputs = partial(check_unchanged, job.source, stats.digest)
        checkpoint = Checkpoint(job.checkpoint, fingerprint, job.fit.checkpoint_s, check_inputs)
    watch = job.watch
    trainee.team.copy_from_first(list(trainee.state().values()))  # GPUs may have rounded it differently
    try:
        outcome = train(
            trainee,
            max_iterations=job.fit.max_iterations if open_end is None else None,
            time_budget_s=job.fit.time_budget,
            checkpoint=checkpoint,
            resume=job.resume,
            open_end=open_end,
            reached=reached,
            watch=None if watch is None else lambda progress: watch(add_r2(progress)),
        )
    finally:
        trainee.feed.close()
    content = trainee.content(outcome)
    return content if open_end is None else replace(content, share_left=open_end.share_left)


def fit_fingerprint(job: Job, batch_size: int) -> dict[str, Any]:
    """What a resumed fit must share with the interrupted one, beside its features and network settings."""
    fit = {**asdict(job.fit), "batch_size": batch_size}
    fingerprint = {name: fit[name] for name in ("batch_size", "schedule", "lr", "muon_lr", "seed", "iterations")}
    labels, head = job.samples.labels, job.head
    fingerprint["labels"] = None if labels is None else digest([labels])
    fingerprint["head"] = None if head is None else digest(head.state_dict().values())
    fingerprint["start"] = None if job.start is None else job.start.fingerprint
    fingerprint["gamma"] = None if head is None else job.fit.gamma
    fingerprint["num_head_samples"] = None if head is None else job.fit.num_head_samples(batch_size)
    return fingerprint


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the tensors' bytes."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
