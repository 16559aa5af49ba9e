"""Extract, encode and replay more maps than fit into memory: time and memory of each stage, one process against two.

    Tiny-ImageNet-100, mirror images -> images.npy, and a ResNet-18 that zoo.py trains in a minute -> trunk.pt2
    images -> krnet extract -> shards/ of maps 256x16x16       the first of them -> krnet record -> model.krn
    shards/, model -> krnet encode -> coded/                   with one process and with two: the same bytes?
    coded/ -> krnet verify --against shards/ -> R2             coded/ -> loader(shuffle=True) -> every map once

The model is one of recorder transform, which needs few samples: principal axes of 500 of these maps, of 65,536 values
each, show a quarter of the variance of the others. Each stage is a command of its own, so that its memory shows. Every
process has one thread, so that two processes have two cores. A row goes to the ledger. 100,000 maps are 26 GB as
float32: that much of the disk, and hours on two cores. With --keep, what is done is kept, and the same command goes on
with the stage that is next.

    python benchmarks/large_store.py --data-dir DIR --samples 2000 --part-samples 256 --shard-size 64MB
    python benchmarks/large_store.py --data-dir DIR --keep WORK
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import jobs
import numpy as np
import torch
import zoo
from cifar100_base import MEAN, STD

import krnet
from krnet.device import pick_device
from krnet.io import ledger

CUT = 13  # layers of the trunk: its maps are 256x16x16
NUM_IMAGES = 50_000  # then their mirror images follow
BITS = 0.25  # a value
BATCH = 64  # images in the trunk, and maps of the loader
SCALING = ("--mean", ",".join(map(str, MEAN)), "--std", ",".join(map(str, STD)))


class Work:
    """The folder of a run, and what is done in it."""

    def __init__(self, folder, args, settings):
        self.folder, self.args = folder, args
        self.log = folder / "done.json"
        self.done = json.loads(self.log.read_text()) if self.log.exists() else {}
        before = self.once("settings", lambda: settings)
        if before != settings:
            raise SystemExit(f"{folder}: was begun with other settings, {before}; give them again, or another folder")

    def once(self, name, make):
        """What make() returns; when it is known already, it is not called."""
        if name not in self.done:
            self.done[name] = make()
            self.log.write_text(json.dumps(self.done))
        return self.done[name]

    def stage(self, name, command, out=None):
        """Run a command that writes `out`, from the start."""

        def make():
            if out is not None:
                path = self.folder / out
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            found = asdict(jobs.run(command, self.args.threads))
            print(f"{name}: {found['seconds']:,.1f} s, {found['peak_bytes']['together'] / 1e9:.2f} GB", flush=True)
            return found

        return self.once(name, make)


def prepare(work):
    """Write images.npy, some.npy (those that the model is fitted to) and trunk.pt2; the shape of a map."""
    args, folder = work.args, work.folder
    made_by = zoo.Zoo(folder, args.data_dir, args.scale, 0, pick_device(None))
    trunk = zoo.backbones.cut(made_by.resnet18, CUT)[0].cpu()
    images = zoo.with_mirrors(made_by.tiny_images(min(args.samples, NUM_IMAGES))[0], args.samples)
    torch.export.save(torch.export.export(trunk, (images[:2].float(),)), folder / "trunk.pt2")
    np.save(folder / "images.npy", images.numpy())
    np.save(folder / "some.npy", images[: args.fit_samples].numpy())
    return list(trunk(images[:1].float()).shape[1:])


def extract(work, images, out, num_processes=1):
    return jobs.krnet(
        "extract", work.folder / images, "--trunk", work.folder / "trunk.pt2", *SCALING, "--batch-size", BATCH,
        "--dtype", work.args.dtype, "--shard-size", work.args.shard_size, "-o", f"{work.folder}/{out}", "-q", "--json",
        num_processes=num_processes,
    )  # fmt: skip


def fit(work, num_values):
    """The model has the bytes that it would have in a recording of `room` samples."""
    args, folder = work.args, work.folder
    room = args.room or args.samples
    budget = math.ceil(BITS / 8 * room * num_values)
    work.stage("extract some", extract(work, "some.npy", "some/"), "some")
    command = jobs.krnet(
        "record", folder / "some", "--recorder", args.model, "--budget", budget, "--room", room, "-o",
        folder / "model.krn", "-q", "--json",
    )  # fmt: skip
    work.stage("fit", command, "model.krn")


def make(work, num_processes):
    """Extract and encode; digests of all files."""
    folder, name = work.folder, f"{num_processes} processes"
    work.stage(f"extract, {name}", extract(work, "images.npy", "shards/", num_processes), "shards")
    command = jobs.krnet(
        "encode", "--model", folder / "model.krn", folder / "shards", "--part-samples", work.args.part_samples, "-o",
        folder / "coded", "-q", "--json", num_processes=num_processes,
    )  # fmt: skip
    work.stage(f"encode, {name}", command, "coded")
    return work.once(f"files, {name}", lambda: {out: jobs.digests(folder / out) for out in ("shards", "coded")})


def replay(work):
    """R2 against the shards, and a pass of a shuffled loader; what verify found."""
    coded = work.folder / "coded"
    found = work.stage("verify", jobs.krnet("verify", coded, "--against", work.folder / "shards", "--json"))
    work.stage("loader", [sys.executable, __file__, "--pass-over", str(coded)])
    return json.loads(found["printed"])


def pass_over(coded):
    recording = krnet.open(coded, None)
    count = sum(len(features) for features, _ in recording.loader(BATCH, shuffle=True))
    assert count == len(recording), f"{count} samples of {len(recording)}"


def row(work, counts, shape, files, checked):
    """The metrics of all stages."""
    num_samples, num_values = work.args.samples, math.prod(shape)
    kept = ("seconds", "cpu_seconds", "peak_bytes")
    done = {name: found for name, found in work.done.items() if isinstance(found, dict) and "seconds" in found}
    stages = {name: {key: found[key] for key in kept} for name, found in done.items()}
    seconds = {name: found["seconds"] for name, found in stages.items()}
    sizes = {name: jobs.size_bytes(work.folder / name) for name in ("shards", "coded")}
    model_bytes = (work.folder / "model.krn").stat().st_size
    first, last = (f"{count} processes" for count in (counts[0], counts[-1]))
    return {
        "shape": shape,
        "stages": stages,
        "samples_per_second": {
            name: num_samples / taken for name, taken in seconds.items() if name not in ("extract some", "fit")
        },
        "speedup": {name: seconds[f"{name}, {first}"] / seconds[f"{name}, {last}"] for name in ("extract", "encode")},
        "equal": {name: all(one[name] == files[0][name] for one in files) for name in ("shards", "coded")},
        "num_files": {name: len(files[0][name]) for name in ("shards", "coded")},
        "bytes": {**sizes, "model": model_bytes},
        "bits_per_value": {"all": 8 * sizes["coded"] / (num_samples * num_values),
                           "parts": 8 * (sizes["coded"] - model_bytes) / (num_samples * num_values)},
        "r2": {"model": checked["model_r2"], "all": checked["r2"]},
        "peak_bytes": max(found["peak_bytes"]["together"] for found in stages.values()),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder that holds tiny-imagenet-100/ (KRNET_DATA)")
    parser.add_argument("--samples", type=int, default=2 * NUM_IMAGES, help="maps (%(default)s)")
    parser.add_argument("--processes", default="1,2", help="of extract and encode, run after run (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="of maps (%(default)s)")
    parser.add_argument("--model", default="transform", help="recorder of the model (%(default)s)")
    parser.add_argument("--fit-samples", type=int, default=500, help="that the model is fitted to (%(default)s)")
    parser.add_argument("--room", type=int, help="samples that the model's bytes are planned for (--samples)")
    parser.add_argument("--part-samples", type=int, default=2048, help="samples in a part (%(default)s)")
    parser.add_argument("--shard-size", default="256MB", help="(%(default)s)")
    parser.add_argument("--scale", choices=zoo.EFFORT, default="small", help="training of the trunk (%(default)s)")
    parser.add_argument("--keep", type=Path, help="folder to work in, which is kept (a temporary one)")
    parser.add_argument("--pass-over", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pass_over:
        return pass_over(args.pass_over)

    ledger.commit()  # looked up now: the source may change before the run ends
    counts = [int(count) for count in args.processes.split(",")]
    args.data_dir = args.data_dir or os.environ.get("KRNET_DATA")
    chosen = {name: value for name, value in vars(args).items() if name not in ("data_dir", "keep", "pass_over")}
    settings = {**chosen, "bits": BITS, "trunk": f"resnet18-small, cut after {CUT} layers"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        work = Work(folder, args, settings)
        shape = work.once("prepared", lambda: prepare(work))
        fit(work, math.prod(shape))
        files = [make(work, count) for count in counts]
        metrics = row(work, counts, shape, files, replay(work))
    seconds = sum(stage["seconds"] for stage in metrics["stages"].values())  # some may be those of an earlier call
    ledger.append("large-store", settings=settings, metrics=metrics, seconds=seconds, seed=0)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
