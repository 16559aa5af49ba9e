"""Measure the gain of starting the paper's network from an earlier recording (`start=`).

400 maps are recorded first. Then 600 maps, the same 400 and 200 more, are recorded from scratch and from the first
recording. Appends a ledger row per variant.

python benchmarks/warm_start.py runs/base      # about a minute on two CPU cores
"""

import argparse
import time
from pathlib import Path

import numpy as np

import krnet
from krnet.io import ledger

PAPER = {"recorder": "paper", "group_size": 32, "d0": 96, "c0": 24, "c1": 64}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder written by cifar100_base.py")
    parser.add_argument("--iterations", type=int, default=120, help="updates of each later fit (%(default)s)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    labels = np.load(args.base / "labels.npy")[:1000]
    order = np.argsort(labels, kind="stable")  # class by class, as in a sequence of tasks
    features, labels = np.load(args.base / "features.npy")[:1000][order], labels[order]
    earlier = krnet.record(features[:400], labels[:400], iterations=250, **PAPER)
    variants = {
        "cold": PAPER,
        "warm": {"start": earlier},
        "warm, a third of the learning rates": {"start": earlier, "lr": 1e-3, "muon_lr": 3.3e-3},
    }
    for name, settings in variants.items():
        started = time.perf_counter()
        recording = krnet.record(features[:600], labels[:600], iterations=args.iterations, **settings)
        r2 = recording.info()["r2"]
        ledger.append(
            "warm-start",
            settings={"variant": name, "samples": 600, "earlier_samples": 400, "iterations": args.iterations, **PAPER},
            metrics={"r2": r2, "earlier_r2": earlier.info()["r2"]},
            seconds=time.perf_counter() - started,
            seed=0,
            class_order="lucir1993",
            files=[recording.path],
        )
        print(f"{name:40s} R2 {r2:.3f}", flush=True)


if __name__ == "__main__":
    main()
