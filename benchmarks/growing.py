"""Measure how much quality a recording loses when it takes up new samples again and again.

    features, class by class -> recording of the first classes -> + a few classes -> recording -> ... -> R2 of all

Three ways are compared; all end with the same number of bytes:
    once    all samples are recorded at once
    grown   each recording starts from the last one (`start=`), whose samples keep their replays
    anew    each recording is fitted to the replays of the last one and the new features, as KRIL does with a recorder
            that cannot grow

Writes a ledger row.

    python benchmarks/growing.py runs/base --recorder pca --budget 3.3MB
"""

import argparse
import itertools
import sys
import tempfile
import time
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
    parser.add_argument("--budget", type=parse_size, default=3_300_000, help="largest final file (3.3MB)")
    parser.add_argument("--first", type=int, default=25, help="classes of the first recording (%(default)s)")
    parser.add_argument("--more", type=int, default=5, help="classes added to each later recording (%(default)s)")
    parser.add_argument(
        "--iterations",
        type=int,
        help="updates of the first fit; later fits get a number in proportion to their samples (the schedule's)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda if there is one)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends
    labels = torch.from_numpy(np.load(args.base / "labels.npy"))
    order = labels.argsort(stable=True)
    features, labels = torch.from_numpy(np.load(args.base / "features.npy"))[order], labels[order]
    counts = torch.bincount(labels)
    ends = counts.cumsum(0)[args.first - 1 :: args.more].tolist()  # number of samples in each recording
    assert ends[-1] == len(labels), f"{len(counts)} classes are not {args.first} and a multiple of {args.more}"
    stats = scan(open_features(features))
    started = time.perf_counter()

    def r2(replays):
        return fidelity(lambda ids: replays[ids], open_features(features), stats).r2

    def record(values, path, budget, share=1.0, **options):
        if args.iterations and get_recorder(args.recorder).trains:
            options["iterations"] = max(1, round(share * args.iterations))
        return krnet.record(
            values, labels[: len(values)], recorder=args.recorder, budget=budget, out=path, device=args.device,
            **options,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{way}.krn" for way in ("once", "grown", "anew")]
        found = {"once_r2": r2(record(features, paths[0], args.budget).replay(torch.arange(len(labels))))}
        print(found, file=sys.stderr, flush=True)
        grown = record(features[: ends[0]], paths[1], args.budget, room=len(labels))
        for before, end in itertools.pairwise(ends):
            last = Path(folder) / f"{before}.krn"
            paths[1].rename(last)
            size = last.stat().st_size
            budget = size + (args.budget - size) * (end - before) // (len(labels) - before)
            grown = record(features[:end], paths[1], budget, (end - before) / ends[0], start=last)
        found["grown_r2"] = r2(grown.replay(torch.arange(len(labels))))
        print(found, file=sys.stderr, flush=True)
        values = features[: ends[0]]
        for before, end in zip([0, *ends], ends):
            values = torch.cat([values[:before], features[before:end]])
            budget = args.budget * end // len(labels)
            paths[2].unlink(missing_ok=True)
            values = record(values, paths[2], budget, min(1.0, end / ends[0])).replay(torch.arange(end)).cpu()
        found["anew_r2"] = r2(values)
        print(found, file=sys.stderr, flush=True)
        append_row("growing", args, found, started, paths)


if __name__ == "__main__":
    main()
