"""Measure what it costs to record samples step by step, with `append`, instead of all at once.

    500 maps -> record -> append 500 -> ... -> append 500 -> recording of 5,000 -> R2, bytes
    5,000 maps -> record, as many bytes -> R2

Two recordings grow: one whose first step knows nothing of the others and has a tenth of the budget, and one whose first
step is planned for all samples (`room`). Each is compared with all samples recorded at once in the same bytes. R2 is
measured on the true features. Writes a ledger row.

    python benchmarks/appending.py runs/base --recorder pca
    python benchmarks/appending.py runs/base --iterations 300 --device cpu
    python benchmarks/appending.py runs/base --recorder pca --order class    5 new classes in each step
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from growth_row import append_row

import krnet
from krnet.config import parse_size
from krnet.features.metrics import fidelity
from krnet.features.source import open_features
from krnet.features.stats import scan
from krnet.io import ledger
from krnet.recorders.base import get_recorder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder written by cifar100_base.py")
    parser.add_argument("--recorder", default="krnet", help="way to store the features; it must grow (%(default)s)")
    parser.add_argument("--budget", type=parse_size, help="bytes of all samples (one bit per value)")
    parser.add_argument("--samples", type=int, default=5000, help="number of samples in all (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="equal parts that they come in (%(default)s)")
    parser.add_argument("--order", choices=("mixed", "class"), default="mixed", help="of the samples (%(default)s)")
    parser.add_argument("--iterations", type=int, help="updates of every fit, if there is a network (the schedule's)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda if there is one)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    labels = torch.from_numpy(np.load(args.base / "labels.npy"))[: args.samples]
    features = torch.from_numpy(np.load(args.base / "features.npy"))[: args.samples]
    if args.order == "class":
        order = labels.argsort(stable=True)
        features, labels = features[order], labels[order]
    assert len(labels) == args.samples, f"{args.base} holds {len(labels)} samples"
    size = -(-args.samples // args.steps)
    parts = [slice(first, first + size) for first in range(0, args.samples, size)]
    args.budget = args.budget or features.numel() // 8
    stats = scan(open_features(features))
    options = {"recorder": args.recorder, "device": args.device}
    if args.iterations and get_recorder(args.recorder).trains:
        options["iterations"] = args.iterations
    started = time.perf_counter()
    found = {}

    def r2(recording, which=slice(None)):
        """R2 of some samples, each channel scaled by its range over all."""
        replays, part = recording[which].cpu(), open_features(features[which])
        return fidelity(lambda ids: replays[ids], part, replace(scan(part), low=stats.low, high=stats.high)).r2

    with tempfile.TemporaryDirectory() as folder:
        files = []
        ways = {"appended": {"budget": args.budget // args.steps}, "room": {"budget": args.budget, "room": len(labels)}}
        for way, first in ways.items():
            path = Path(folder) / f"{way}.krn"
            recording = krnet.record(features[parts[0]], labels[parts[0]], out=path, **first, **options)
            at_first = recording[:]
            for part in parts[1:]:
                recording = recording.append(features[part], labels[part], out=path)
            assert torch.equal(recording[: len(at_first)], at_first), "append has changed an old sample"
            once = krnet.record(features, labels, budget=recording.nbytes, **options)
            files.append(path)
            found[way] = {
                "r2": r2(recording),
                "stated_r2": recording.r2,
                "bytes": recording.nbytes,
                "step_r2": [round(r2(recording, part), 4) for part in parts],
                "once_r2": r2(once),
                "once_bytes": once.nbytes,
            }
            print(way, found[way], file=sys.stderr, flush=True)
        append_row("appending", args, found, started, files)


if __name__ == "__main__":
    main()
