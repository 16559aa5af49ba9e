"""How fast, and how fast it could be: `krnet bench speed`.

    settings         -> step_work -> FLOPs and bytes that a step cannot do without
    the device       -> ceilings  -> FLOP/s and bytes/s, measured in the same run
    both             -> floor     -> the time no step can beat; its share of the time measured
    the same network -> replay, against plain eager PyTorch and against reading raw features from disk

Absolute times of a shared machine mean little; every comparison here is a ratio within one run.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krnet import api
from krnet.device import exact_math, pick_device, synchronize
from krnet.features.feed import Feed
from krnet.features.samples import Samples
from krnet.features.source import FeatureSource, check_labels, open_features
from krnet.features.stats import scan
from krnet.io import ledger
from krnet.nn import layers
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import KRNet
from krnet.recorders.base import Job
from krnet.recorders.fit import batch_size
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.paper.recorder import KRNetFit, PaperRecorder
from krnet.train.config import FitConfig
from krnet.train.loop import Outcome

REPLAY_BATCHES = (1, 256, 4096)
ADAM_BYTES = 32  # per weight: weight, two moments read and written, gradient written and read, all fp32
LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Work:
    """What must be computed and moved, whatever the code."""

    flops: float
    bytes: float

    def floor_s(self, ceilings: dict[str, float]) -> float:
        return self.flops / ceilings["flops_per_second"] + self.bytes / ceilings["bytes_per_second"]


def step_work(config: NetworkConfig, num_groups: int, batch: int, value_bytes: int = 2) -> Work:
    """One update with Adam: every layer fused with its norm and activation, so that only its ends touch memory.

    Forward a layer reads its input and writes its output; backward it reads both and the output's gradient and
    writes the input's. Counted by running the network without values (torch's meta device).
    """
    flops, moved = 0.0, 0.0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal flops, moved
        weight = layer.weight
        assert isinstance(weight, Tensor)
        ends = inputs[0] if isinstance(layer, nn.ConvTranspose2d) else output
        # A product for each weight of a filter, at each place and channel that the filter is laid on.
        flops += 2 * ends.numel() * weight[0].numel()
        moved += 3 * value_bytes * (inputs[0].numel() + output.numel())

    with torch.device("meta"):
        net = KRNet(config, num_groups)
        hooks = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, LAYERS)]
        net(torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    num_weights = sum(p.numel() for p in net.parameters())
    return Work(3 * flops, moved + ADAM_BYTES * num_weights)


def timed(run: Callable[[], object], device: torch.device, at_least_s: float = 0.5, repeats: int = 3) -> float:
    """Seconds per call: the median of a few measurements, after a warm-up."""
    run()
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    number = max(1, math.ceil(at_least_s / repeats / max(time.perf_counter() - started, 1e-7)))
    measured = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(number):
            run()
        synchronize(device)
        measured.append((time.perf_counter() - started) / number)
    return sorted(measured)[repeats // 2]


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device does at its best: a large matrix product in the precision of fitting, and a large copy."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = timed(lambda: a @ b, device)
    source = torch.randn((1 << 30) if cuda else (1 << 25), device=device)  # well past any cache
    target = torch.empty_like(source)
    copy_s = timed(lambda: target.copy_(source), device)
    return {"flops_per_second": 2 * size**3 / product_s, "bytes_per_second": 2 * source.nbytes / copy_s}


STEPS = {
    "adam": ("paper", None),
    "adam plain": ("paper", None),
    "muon": ("fast", None),
    "muon plain": ("fast", None),
    "muon 4 bits": ("fast", 4.0),
}
"""Steps that are timed: schedule, and bits of a weight that it is trained for."""


def bench(
    features: Any = None,
    labels: Any = None,
    *,
    preset: str | None = "cifar100",
    num_samples: int | None = None,
    device: str | None = None,
    targets: tuple[float, ...] = (),
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> dict[str, Any]:
    """Measure step and replay; given features, also the time to reach each R2 of `targets`."""
    where = pick_device(device)
    if features is None:
        channels, size = (256, 16) if (preset or "").startswith("imagenet") else (64, 8)
        count = num_samples or (5000 if where.type == "cuda" else 600)
        say(f"no features given: {count} random maps of {channels}x{size}x{size}")
        generator = torch.Generator().manual_seed(0)
        features = torch.rand(count, channels, size, size, generator=generator)
    source = open_features(features)
    samples = Samples(len(source), source.shape, check_labels(labels, len(source)))
    stats = scan(source)
    say("ceilings of the device")
    limits = ceilings(where)
    result: dict[str, Any] = {"device": ledger.device_name(), "preset": preset, **limits, "steps": {}}
    fits: dict[str, KRNetFit] = {}
    # The plain version after the other: what cuDNN chose for it, it would keep.
    for name, (schedule, bits) in STEPS.items():
        if name.endswith("plain") and where.type == "cpu":
            continue  # there the plain version is the only one
        say(f"step: {name}")
        fit = FitConfig(schedule=schedule, device=str(where), compile=not name.endswith("plain"), **settings)
        job = Job(source, samples, stats, fit, where, preset=preset, settings={} if bits is None else {"bits": bits})
        started = time.perf_counter()
        config = PaperRecorder().config(job)
        table = GroupTable.build(len(source), samples.labels, config.group_size)
        trainee = fits[name] = KRNetFit(job, config, table)
        trainee.step(0, 0.5)
        synchronize(where)
        ready_s = time.perf_counter() - started
        iteration = iter(range(1, 1 << 30))
        step_s = timed(partial(next_step, trainee, iteration), where, 2.0)
        work = step_work(config, table.num_groups, batch_size(job), 2 if where.type == "cuda" else 4)
        floor_s = work.floor_s(limits)
        result["steps"][name] = {
            "milliseconds": 1e3 * step_s,
            "floor_milliseconds": 1e3 * floor_s,
            "times_floor": step_s / floor_s,
            "ready_seconds": ready_s,
            "batch_size": batch_size(job),
            "flops": work.flops,
            "bytes": work.bytes,
        }
        trainee.feed.close()
    trainee = fits["muon"]
    if where.type == "cuda":
        say("step: features streamed from disk")
        result["steps"]["muon"]["streamed_milliseconds"] = 1e3 * streamed_step_s(trainee, source, where)
    result["replay"] = bench_replay(trainee, source.shape, samples, where, say)
    result["targets"] = {}
    for target in targets:
        say(f"time to R2 {target}")
        recording = api.record(
            source, labels, preset=preset, target_r2=target, device=str(where), recorder="paper", **settings
        )
        info = recording.info()
        keys = ("r2", "iterations", "fit_seconds", "stopped_by")
        result["targets"][str(target)] = {key: info[key] for key in keys}
    return result


class Streamed(Feed):
    """A feed of features that would not fit on the device."""

    def find_resident(self) -> None:
        return None


def streamed_step_s(trainee: KRNetFit, source: FeatureSource, device: torch.device) -> float:
    """The step when each batch comes from a file: the same time, if reading keeps up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        np.save(path, source.read(torch.arange(min(len(source), 25_000))).numpy())
        feed, trainee.feed = trainee.feed, Streamed(open_features(path), trainee.feed.batch_size, 0, device)
        graph, trainee.graph = trainee.graph, trainee.capture()
        try:
            return timed(partial(next_step, trainee, iter(range(1 << 30))), device, 2.0)
        finally:
            trainee.feed.close()
            trainee.feed, trainee.graph = feed, graph


def next_step(trainee: KRNetFit, iterations: Iterator[int]) -> Tensor:
    return trainee.step(next(iterations), 0.5)


@torch.inference_mode()
def plain(net: nn.Module, group: Tensor, slot: Tensor) -> Tensor:
    """The network as it is written, in fp32."""
    with exact_math(), layers.plain():
        return net(group, slot)


def from_disk(source: FeatureSource, ids: Tensor, device: torch.device) -> Tensor:
    return source.read(ids).to(device)


def bench_replay(
    trainee: KRNetFit, shape: tuple[int, ...], samples: Samples, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """Samples per second by batch size: exact, fast, plain eager fp32, and raw features read from a .npy file."""
    content, table = trainee.content(Outcome(0, 0.0, "bench")), trainee.table
    replayer = PaperRecorder().replay(samples, content.settings, content, device)
    generator = torch.Generator().manual_seed(0)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "raw.npy"
        np.save(path, np.zeros((samples.num_samples, *shape), np.float32))
        raw = open_features(path)
        for batch in REPLAY_BATCHES:
            say(f"replay: batch {batch}")
            ids = torch.randint(samples.num_samples, (batch,), generator=generator)
            group, slot = table.group[ids].to(device), table.slot[ids].to(device)
            ways: dict[str, Callable[[], Tensor]] = {
                "exact": partial(replayer.decode, ids),
                "fast": partial(replayer.decode, ids, fast=True),
                "plain": partial(plain, trainee.net, group, slot),
                "raw_from_disk": partial(from_disk, raw, ids, device),
            }
            result[str(batch)] = {name: batch / timed(run, device) for name, run in ways.items()}
    return result
