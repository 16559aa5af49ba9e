"""Measure the speed of a fit and of replay, and compare it with what the device could do: `krnet bench speed`.

    settings    -> step_cost     -> FLOPs and bytes that one training step needs at least
    device      -> measure_peaks -> FLOP/s and bytes/s of the device, measured in the same run
    both        -> floor_s       -> a lower bound of the time of a step; times_floor = measured time / floor
    the network -> bench_replay  -> samples per second, beside plain eager PyTorch and reading raw features from disk

Only ratios within one run are meaningful: absolute times vary on a shared machine.
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
from krnet.features.feature_source import FeatureSource
from krnet.features.feed import Feed
from krnet.features.labels import check_labels
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.io import ledger
from krnet.nn import layers
from krnet.nn.paper_config import NetworkConfig
from krnet.nn.paper_net import KRNet
from krnet.progress import Watch, announcing
from krnet.recorders.base import Job
from krnet.recorders.fit import batch_size
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.paper.recorder import KRNetFit, PaperRecorder
from krnet.train.config import FitConfig
from krnet.train.loop import Outcome

REPLAY_BATCHES = (1, 256, 4096)  # samples
STREAMED_SAMPLES = 25_000  # size limit of the file that a streamed step reads, in samples
STEP_TIME_S = 2.0  # seconds over which a step is timed
HALF_WAY = 0.5  # progress of the fit, which sets the learning rate of the timed steps
ADAM_BYTES = 32  # per weight: weight and two moments read and written, gradient written and read, all fp32
COUNTED_LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)  # the other layers cost little beside these
TIMED_STEPS = {
    "adam": ("paper", None),
    "adam plain": ("paper", None),
    "muon": ("fast", None),
    "muon plain": ("fast", None),
    "muon 4 bits": ("fast", 4.0),
}
"""Name -> (schedule, bits per weight; None trains fp32 weights). Plain is the network without fused kernels."""


@dataclass(frozen=True)
class StepCost:
    """FLOPs and bytes moved by one step, whatever the implementation."""

    flops: float
    bytes: float

    def floor_s(self, peaks: dict[str, float]) -> float:
        """Return the seconds that the step takes at the peak rates of the device."""
        return self.flops / peaks["flops_per_second"] + self.bytes / peaks["bytes_per_second"]


def step_cost(config: NetworkConfig, num_groups: int, batch: int, value_bytes: int = 2) -> StepCost:
    """Count the FLOPs and bytes of one update with Adam, by running the network on torch's meta device.

    Each layer is assumed to be fused with its norm and activation, so that only its input and output touch memory. The
    forward pass reads the input and writes the output. The backward pass reads both and the output's gradient, and
    writes the input's gradient.
    """
    flops, bytes_moved = 0.0, 0.0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal flops, bytes_moved
        weight = layer.weight
        assert isinstance(weight, Tensor)
        # weight[0] is one filter. It is multiplied once per output value; in a deconvolution, once per input value.
        filtered = inputs[0] if isinstance(layer, nn.ConvTranspose2d) else output
        flops += 2 * filtered.numel() * weight[0].numel()
        bytes_moved += 3 * value_bytes * (inputs[0].numel() + output.numel())

    with torch.device("meta"):
        net = KRNet(config, num_groups)
        hooks = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, COUNTED_LAYERS)]
        net(torch.zeros(batch, dtype=torch.long), torch.zeros(batch, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    num_weights = sum(p.numel() for p in net.parameters())
    # The backward pass takes twice the products of the forward pass.
    return StepCost(3 * flops, bytes_moved + ADAM_BYTES * num_weights)


def seconds_per_call(
    run: Callable[[], object], device: torch.device, at_least_s: float = 0.5, repeats: int = 3
) -> float:
    """Return the median of `repeats` measurements that take `at_least_s` seconds together, after a warm-up call."""
    run()
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    num_calls = max(1, math.ceil(at_least_s / repeats / max(time.perf_counter() - started, 1e-7)))
    measured_s = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(num_calls):
            run()
        synchronize(device)
        measured_s.append((time.perf_counter() - started) / num_calls)
    return sorted(measured_s)[repeats // 2]


def measure_peaks(device: torch.device, at_least_s: float = 0.5) -> dict[str, float]:
    """Measure FLOP/s by a large matrix product, in the precision of a fit, and bytes/s by a large copy."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (2048, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_s = seconds_per_call(lambda: a @ b, device, at_least_s)
    source = torch.randn((1 << 30) if cuda else (1 << 25), device=device)  # larger than any cache
    target = torch.empty_like(source)
    copy_s = seconds_per_call(lambda: target.copy_(source), device, at_least_s)
    return {"flops_per_second": 2 * size**3 / product_s, "bytes_per_second": 2 * source.nbytes / copy_s}


def bench(
    features: Any = None,
    labels: Any = None,
    *,
    preset: str | None = "cifar100",
    num_samples: int | None = None,
    device: str | None = None,
    targets: tuple[float, ...] = (),
    step_time_s: float = STEP_TIME_S,
    watch: Watch | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Time the steps of a fit and replay; given features, also the fit to each R2 of `targets`.

    step_time_s  seconds over which each step is timed; all else is timed over a quarter of them
    """
    torch_device, say = pick_device(device), announcing(watch)
    if features is None:
        channels, size = (256, 16) if (preset or "").startswith("imagenet") else (64, 8)
        count = num_samples or (5000 if torch_device.type == "cuda" else 600)
        say(f"no features given: {count} random maps of {channels}x{size}x{size}")
        generator = torch.Generator().manual_seed(0)
        features = torch.rand(count, channels, size, size, generator=generator)
    source = open_features(features)
    samples = Samples(len(source), source.shape, check_labels(labels, len(source)))
    stats = scan(source)
    say("ceilings of the device")
    peaks = measure_peaks(torch_device, step_time_s / 4)
    result: dict[str, Any] = {"device": ledger.device_name(), "preset": preset, **peaks, "steps": {}}
    fits: dict[str, KRNetFit] = {}
    # The plain step comes after the fused one: cuDNN would keep the algorithms that it chose for the plain one.
    for name, (schedule, bits) in TIMED_STEPS.items():
        if name.endswith("plain") and torch_device.type == "cpu":
            continue  # a CPU has no fused kernels: both steps would be the same
        say(f"step: {name}")
        fit = FitConfig(schedule=schedule, device=str(torch_device), compile=not name.endswith("plain"), **settings)
        own_settings = {} if bits is None else {"bits": bits}
        job = Job(source, samples, stats, fit, torch_device, preset=preset, settings=own_settings)
        started = time.perf_counter()
        config = PaperRecorder().config(job)
        table = GroupTable.build(len(source), samples.labels, config.group_size)
        trainee = fits[name] = KRNetFit(job, config, table)
        trainee.step(0, HALF_WAY)
        synchronize(torch_device)
        ready_s = time.perf_counter() - started
        iterations = iter(range(1, 1 << 30))
        step_s = seconds_per_call(partial(run_step, trainee, iterations), torch_device, step_time_s)
        cost = step_cost(config, table.num_groups, batch_size(job), 2 if torch_device.type == "cuda" else 4)
        floor_s = cost.floor_s(peaks)
        result["steps"][name] = {
            "milliseconds": 1e3 * step_s,
            "floor_milliseconds": 1e3 * floor_s,
            "times_floor": step_s / floor_s,
            "ready_seconds": ready_s,
            "batch_size": batch_size(job),
            "flops": cost.flops,
            "bytes": cost.bytes,
        }
        trainee.feed.close()
    trainee = fits["muon"]
    if torch_device.type == "cuda":
        say("step: features streamed from disk")
        streamed_s = streamed_step_s(trainee, source, torch_device, step_time_s)
        result["steps"]["muon"]["streamed_milliseconds"] = 1e3 * streamed_s
    result["replay"] = bench_replay(trainee, source.shape, samples, torch_device, say, step_time_s / 4)
    result["targets"] = {}
    for target in targets:
        say(f"time to R2 {target}")
        recording = api.record(
            source, labels, preset=preset, stop_at_r2=target, device=str(torch_device), recorder="paper", **settings
        )
        info = recording.info()
        keys = ("r2", "iterations", "fit_seconds", "stopped_by")
        result["targets"][str(target)] = {key: info[key] for key in keys}
    return result


class StreamedFeed(Feed):
    """A feed that always reads from disk, as for features too large for the device."""

    def find_resident(self) -> None:
        return None


def streamed_step_s(trainee: KRNetFit, source: FeatureSource, device: torch.device, at_least_s: float) -> float:
    """Time a step whose batches are read from a file; it is as fast as in memory while reading keeps up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        np.save(path, source.read(torch.arange(min(len(source), STREAMED_SAMPLES))).numpy())
        feed, trainee.feed = trainee.feed, StreamedFeed(open_features(path), trainee.feed.batch_size, 0, device)
        graph, trainee.graph = trainee.graph, trainee.capture()
        try:
            return seconds_per_call(partial(run_step, trainee, iter(range(1 << 30))), device, at_least_s)
        finally:
            trainee.feed.close()
            trainee.feed, trainee.graph = feed, graph


def run_step(trainee: KRNetFit, iterations: Iterator[int]) -> Tensor:
    return trainee.step(next(iterations), HALF_WAY)


@torch.inference_mode()
def replay_plain(net: nn.Module, group: Tensor, slot: Tensor) -> Tensor:
    """Run the network in eager fp32, without fused kernels."""
    with exact_math(), layers.plain():
        return net(group, slot)


def read_from_disk(source: FeatureSource, ids: Tensor, device: torch.device) -> Tensor:
    return source.read(ids).to(device)


def bench_replay(
    trainee: KRNetFit,
    shape: tuple[int, ...],
    samples: Samples,
    device: torch.device,
    say: Callable[[str], None],
    at_least_s: float = 0.5,
) -> dict[str, Any]:
    """Measure samples per second for each batch size and each way to get features back.

    exact, fast     the replayer in fp32, and in bf16 on a GPU
    plain           the network in eager fp32
    raw_from_disk   raw features read from a .npy file
    """
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
                "plain": partial(replay_plain, trainee.net, group, slot),
                "raw_from_disk": partial(read_from_disk, raw, ids, device),
            }
            result[str(batch)] = {name: batch / seconds_per_call(run, device, at_least_s) for name, run in ways.items()}
    return result
