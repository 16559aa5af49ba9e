"""Show where a training step of the paper's network spends its time on a GPU: its kernels, longest first.

    python benchmarks/profile_step.py [--preset cifar100] [--schedule paper] [--plain] [--parts]

Prints times and writes nothing; benchmarks/profile.md holds the findings.
"""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from krnet.bench.speed import seconds_per_call
from krnet.device import pick_device
from krnet.features.samples import Samples
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.nn import layers
from krnet.recorders.base import Job
from krnet.recorders.fit import batch_size
from krnet.recorders.paper.groups import GroupTable
from krnet.recorders.paper.recorder import KRNetFit, PaperRecorder
from krnet.train.config import FitConfig

NUM_SAMPLES = 4000  # a batch is at most a third of all samples: this allows the paper's 1,000


def trainee_for(preset, schedule, fused, device):
    channels, size = (256, 16) if preset.startswith("imagenet") else (64, 8)
    source = open_features(torch.rand(NUM_SAMPLES, channels, size, size))
    samples = Samples(len(source), source.shape, torch.arange(NUM_SAMPLES) // 500)
    fit = FitConfig(schedule=schedule, device=str(device), compile=fused)
    job = Job(source, samples, scan(source), fit, device, preset=preset)
    config = PaperRecorder().config(job)
    started = time.perf_counter()
    trainee = KRNetFit(job, config, GroupTable.build(NUM_SAMPLES, samples.labels, config.group_size))
    torch.cuda.synchronize()
    print(f"batch {batch_size(job)}, ready after {time.perf_counter() - started:.1f} s")
    return trainee


def show_kernels(trainee, steps=5):
    batch = trainee.feed.batch(0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            trainee._update(*batch)
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    total_us = sum(row.self_device_time_total for row in rows)
    print(f"kernels: {total_us / steps / 1e3:.2f} ms a step")
    for row in rows[:32]:
        print(f"{row.self_device_time_total / steps:9.1f} us {row.count / steps:6.1f} x  {row.key[:110]}")


def show_deconvolutions(trainee, device):
    """Time two ways to compute the deconvolution of stride 1."""
    weight = trainee.net.decoder.deconv[0].weight.detach().bfloat16()
    if trainee.config.stride != 1:
        return
    c0, h, w = trainee.net.decoder.start_shape
    x = torch.randn(1000, c0, h, w, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    flipped = weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        for name, run, operand in (
            ("transposed", lambda x, k: F.conv_transpose2d(x, k, padding=2), weight),
            ("flipped", lambda x, k: F.conv2d(x, k, padding=2), flipped),
        ):
            x, operand = x.detach().requires_grad_(), operand.detach().requires_grad_()
            y = run(x, operand)
            direction = torch.randn_like(y)
            forward = seconds_per_call(lambda: run(x, operand), device, 0.2)
            both = seconds_per_call(lambda: torch.autograd.grad(run(x, operand), (x, operand), direction), device, 0.2)
            print(f"deconvolution {name}, tuned {benchmark}: {1e6 * forward:.0f} us, with backward {1e6 * both:.0f} us")
    torch.backends.cudnn.benchmark = True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar100", help="network sizes of the paper (%(default)s)")
    parser.add_argument("--schedule", default="paper", help="fast or paper (%(default)s)")
    parser.add_argument("--plain", action="store_true", help="eager PyTorch instead of fused kernels")
    parser.add_argument("--parts", action="store_true", help="also time two forms of the deconvolution")
    args = parser.parse_args()
    device = pick_device("cuda")
    trainee = trainee_for(args.preset, args.schedule, not args.plain, device)
    iterations = iter(range(1 << 30))
    print(f"step {1e3 * seconds_per_call(lambda: trainee.step(next(iterations), 0.5), device, 1.0):.2f} ms")
    with layers.plain() if args.plain else nullcontext():
        show_kernels(trainee)
        if args.parts:
            show_deconvolutions(trainee, device)


if __name__ == "__main__":
    main()
