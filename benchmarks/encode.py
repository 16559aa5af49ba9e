"""Measure krnet.encode at a quarter of a bit a value: against the trunk that makes the maps, and recorder transform.

    images -> trunk -> maps; the first of them -> record, with room for all -> a model
    maps, model -> encode    maps -> record with transform    images -> trunk

The model is fitted again until the parts of encode take the aimed bits, to 1 %; transform gets as many bytes. The
model's own bytes are stated beside them: they are the same for any number of samples. The three take turns on the same
samples in one run, so that their ratios hold on a busy machine, too. A row goes to the ledger, with rates, bytes and
R2. The maps are 10,000 of CIFAR-100, 64x8x8, from ResNet-32. Minutes on two cores.

    python benchmarks/encode.py --data-dir DIR
    python benchmarks/encode.py --data-dir DIR --model krnet --moves 0
"""

import argparse
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cifar100_base import MEAN, STD
from extract import load_trunk, memory_bytes, reset_peak

import krnet
from krnet.device import exact_math, pick_device, synchronize
from krnet.io import ledger

FIT_SAMPLES = 2500  # that the model is fitted to
TRUNK_BATCH = 250
MAX_FITS, TOLERANCE = 8, 0.01  # of the search for a model whose parts have the aimed bytes


@torch.no_grad()
def run_trunk(trunk, images, device, keep=False):
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    made = []
    with exact_math():
        for part in images.split(TRUNK_BATCH):
            maps = trunk((part.to(device).float() / 255 - mean) / std)
            made += [maps.cpu()] if keep else []
    synchronize(device)
    return torch.cat(made) if keep else None


def timed(run):
    reset_peak()
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, memory_bytes("VmHWM"), result


def fit(record, encode, aimed_bytes):
    """A model, seconds of its fit, and bytes of the parts that it codes: about those that are aimed at."""
    budget = aimed_bytes
    for _ in range(MAX_FITS):
        seconds, _, model = timed(lambda: record(budget))
        written = encode(model).info()
        parts_bytes = written["bytes"] - written["model_bytes"]
        print(f"model of {written['model_bytes']:,} bytes: parts of {parts_bytes:,} of {aimed_bytes:,}", flush=True)
        if abs(parts_bytes / aimed_bytes - 1) < TOLERANCE:
            break
        budget = int(budget * aimed_bytes / parts_bytes)
    return model, seconds, parts_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder of the data sets (KRNET_DATA)")
    parser.add_argument("--model", default="pca", help="recorder of the model (%(default)s)")
    parser.add_argument("--samples", type=int, default=10_000, help="maps that are encoded (%(default)s)")
    parser.add_argument("--bits", type=float, default=0.25, help="a value of the parts (%(default)s)")
    parser.add_argument("--moves", type=int, help="of recorder krnet, see krnet.encode (its default)")
    parser.add_argument("--iterations", type=int, default=300, help="of the fit of a network (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each (%(default)s)")
    args = parser.parse_args()

    ledger.commit()  # looked up now: the source may change before the run ends
    started, device = time.perf_counter(), pick_device(None)
    images = krnet.data.load("cifar100", args.data_dir).train.images[: args.samples]
    trunk = load_trunk(device)
    maps = run_trunk(trunk, images, device, keep=True)
    values = math.prod(maps.shape[1:])
    aimed_bytes = math.ceil(args.bits / 8 * len(maps) * values)
    iterations = {"iterations": args.iterations} if args.model == "krnet" else {}
    moves = {} if args.moves is None else {"moves": args.moves}
    with tempfile.TemporaryDirectory() as folder:
        outs = (Path(folder) / f"out{number}" for number in itertools.count())

        def record(budget):
            return krnet.record(
                maps[:FIT_SAMPLES], recorder=args.model, budget=budget, room=len(maps), out=Path(folder) / "model.krn",
                device=str(device), **iterations,
            )  # fmt: skip

        def encode(model):
            return krnet.encode(model, maps, out=next(outs), device=str(device), **moves)

        model, fit_s, parts_bytes = fit(record, encode, aimed_bytes)
        runs = {
            "trunk": lambda: run_trunk(trunk, images, device),
            "encode": lambda: encode(model),
            "transform": lambda: krnet.record(maps, recorder="transform", budget=parts_bytes, device=str(device)),
        }
        found = {name: [] for name in runs}
        for number in range(args.rounds):
            for name in list(runs)[number % 3 :] + list(runs)[: number % 3]:
                found[name].append(timed(runs[name]))
                print(f"{name}: {len(maps) / found[name][-1][0]:,.0f} samples/s", flush=True)
    seconds = {name: statistics.median(each[0] for each in times) for name, times in found.items()}
    encoded, transformed = found["encode"][-1][2], found["transform"][-1][2]
    sizes = {"encode": parts_bytes, "encode_and_model": encoded.nbytes, "transform": transformed.nbytes}
    metrics = {
        "samples": len(maps),
        "shape": list(maps.shape[1:]),
        "samples_per_second": {name: len(maps) / taken for name, taken in seconds.items()},
        "encode_per_trunk": seconds["trunk"] / seconds["encode"],
        "encode_per_transform": seconds["transform"] / seconds["encode"],
        "fit_seconds": fit_s,
        "bytes": sizes,
        "bits_per_value": {name: 8 * size / (len(maps) * values) for name, size in sizes.items()},
        "r2": {"model": model.r2, "encode": encoded.r2, "transform": transformed.r2},
        "peak_bytes": {name: max(each[1] for each in times) for name, times in found.items()},
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    settings = {
        "model": args.model, "bits": args.bits, "fit_samples": FIT_SAMPLES, "samples": args.samples,
        "moves": args.moves, "iterations": iterations.get("iterations"), "trunk": "resnet32, cut after block 11",
    }  # fmt: skip
    ledger.append("encode", settings=settings, metrics=metrics, seconds=time.perf_counter() - started, seed=0)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
