"""Time one training step of the base task and of KRIL's F2, at the size of CIFAR-100, on random images.

    python benchmarks/learn_steps.py [--profile] [--set NAME=VALUE]

Appends a row of milliseconds to the ledger. --profile prints the kernels of a step instead, longest first.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from krnet import data
from krnet.bench.speed import seconds_per_call
from krnet.config import parse_setting
from krnet.data import protocol
from krnet.device import pick_device
from krnet.io import ledger
from krnet.learners import base
from krnet.learners.kril.batches import NewFeatures
from krnet.learners.kril.learner import Kril


def random_cifar(num_train, num_test):
    """Make random images of CIFAR's size: what an image shows does not change the time of a step."""
    images = torch.randint(0, 256, (num_train + num_test, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(num_train + num_test) % 100
    train, test = (images[:num_train], labels[:num_train]), (images[num_train:], labels[num_train:])
    return data.from_arrays(*train, *test, name="random", pad=4, flip=True)


def kril_work(learner):
    """Yield the training of the base task, and that of F2 in the last task."""
    context = learner.context
    for task in range(context.split.num_tasks):
        learner.expand(task)
        if task == 0:
            yield learner.base_work()
    learner.model.eval()
    old = torch.cat([context.task_ids(task) for task in range(learner.task)])
    replays = learner.apply(learner.trunk, context.train, old)
    ids = context.task_ids(learner.task)
    new = NewFeatures(
        learner.trunk, context.train, ids, context.train_labels[ids], learner.config.new_features_kind, learner
    )
    yield learner.f2_work(replays, context.train_labels[old], new)


def milliseconds(work, device):
    work.modules.train()
    iterations = iter(range(1 << 30))
    work.step(next(iterations), 0.0)
    return 1e3 * seconds_per_call(lambda: work.step(next(iterations), 0.0), device, 2.0)


def show_kernels(work, steps=5):
    from torch.profiler import ProfilerActivity, profile

    work.modules.train()
    work.step(0, 0.0)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for step in range(steps):
            work.step(step, 0.0)
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda row: -row.self_device_time_total)
    total_us, count = sum(row.self_device_time_total for row in rows), sum(row.count for row in rows)
    print(f"{work.name}: {total_us / steps / 1e3:.3f} ms in {count / steps:.0f} kernels")
    for row in rows[:24]:
        print(f"{row.self_device_time_total / steps:9.1f} us {row.count / steps:6.1f} x  {row.key[:100]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="print the kernels instead (GPU only)")
    parser.add_argument("--samples", type=int, default=50_000, help="number of training images (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of kril")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    started, device = time.perf_counter(), pick_device(None)
    images = random_cifar(args.samples, args.samples // 5)
    split = protocol.split("lucir1993", num_classes=100, base_classes=50, tasks=10)
    config = base.make_config(Kril, dict(parse_setting(item) for item in args.set))
    with tempfile.TemporaryDirectory() as folder:
        learner = Kril(base.Context(images, split, device, 0, Path(folder)), config)
        times = {}
        for work in kril_work(learner):
            if args.profile:
                show_kernels(work)
                continue
            times[f"{work.name}_step_milliseconds"] = milliseconds(work, device)
            print(json.dumps(times), flush=True)
            work.graph = None
    if times:
        ledger.append(
            "learn-steps", settings=base.plain_settings(config) | {"samples": args.samples}, metrics=times,
            seconds=time.perf_counter() - started, seed=0, class_order=f"{split.order_name} ({split.hash})",
        )  # fmt: skip


if __name__ == "__main__":
    main()
