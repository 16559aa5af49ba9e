"""Measure krnet.extract on the 50,000 training images of CIFAR-100: its memory, and its rate against the bare trunk.

    images (50000, 3, 32, 32) -> ResNet-32 up to block 11 (results/cifar100-base.safetensors) -> maps (50000, 64, 8, 8)

The bare trunk gets the same batches, scaled alike, and its features are thrown away. The two take turns, each being the
first in every other round. A row goes to the ledger. Minutes on a CPU, seconds on a GPU.

    python benchmarks/extract.py --data-dir DIR
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
from cifar100_base import MEAN, STD, resnet32
from safetensors.torch import load_file

import krnet
from krnet.device import exact_math, pick_device, synchronize
from krnet.io import ledger

NETWORK = Path(__file__).parents[1] / "results" / "cifar100-base.safetensors"


def load_trunk(device):
    trunk, head = resnet32(50)
    torch.nn.Sequential(trunk, head).load_state_dict(load_file(NETWORK))
    return trunk.to(device).eval()


def memory_bytes(name):
    """VmRSS, the resident memory, or VmHWM, its peak since `reset_peak`."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


def measure(run):
    """Seconds, CPU seconds of all threads, and peak resident memory of a call."""
    reset_peak()
    started, cpu_started = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - cpu_started, memory_bytes("VmHWM")


@torch.no_grad()
def run_bare(trunk, images, batch, device):
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (MEAN, STD))
    with exact_math():
        for part in images.split(batch):
            trunk((part.to(device).float() / 255 - mean) / std)
    synchronize(device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder that holds cifar-100-python/ (KRNET_DATA)")
    parser.add_argument("--out", type=Path, help="folder for the file of features, 0.8 GB (a temporary one)")
    parser.add_argument("--batch-size", type=int, default=256, help="images a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="passes over all images, of each (%(default)s)")
    parser.add_argument("--limit", type=int, help="number of images (all 50,000)")
    args = parser.parse_args()

    ledger.commit()  # looked up now: the source may change before the run ends
    started = time.perf_counter()
    device = pick_device(None)
    trunk = load_trunk(device)
    split = krnet.data.load("cifar100", args.data_dir).train
    images, labels = split.images[: args.limit], split.labels[: args.limit]
    before = memory_bytes("VmRSS")
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        path = Path(folder) / "features.safetensors"

        def run_extract(count=None):
            options = {"mean": MEAN, "std": STD, "device": device, "batch_size": args.batch_size}
            krnet.extract(trunk, images[:count], labels[:count], out=path, **options)

        run_bare(trunk, images[: 4 * args.batch_size], args.batch_size, device)
        run_extract(4 * args.batch_size)
        found = {"bare": [], "extract": []}
        runs = {
            "bare": lambda: run_bare(trunk, images, args.batch_size, device),
            "extract": run_extract,
        }
        for round_number in range(args.rounds):
            for name in ("bare", "extract") if round_number % 2 else ("extract", "bare"):
                found[name].append(measure(runs[name]))
                print(f"{name}: {len(images) / found[name][-1][0]:,.0f} images/s", flush=True)
        file_bytes = path.stat().st_size
    seconds, cpu_seconds, peaks = (
        {name: [each[i] for each in measured] for name, measured in found.items()} for i in range(3)
    )
    metrics = {
        "images": len(images),
        "file_bytes": file_bytes,
        "images_per_second": {name: len(images) / statistics.median(taken) for name, taken in seconds.items()},
        "seconds": seconds,
        "share_of_bare_rate": statistics.median(seconds["bare"]) / statistics.median(seconds["extract"]),
        "cpu_seconds": cpu_seconds,  # other work on the machine stretches the seconds, not these
        "resident_bytes_before": before,
        "resident_bytes_peak": {name: max(found_peaks) for name, found_peaks in peaks.items()},
    }
    metrics["resident_bytes_growth"] = metrics["resident_bytes_peak"]["extract"] - before
    if not args.limit:
        settings = {"batch_size": args.batch_size, "rounds": args.rounds, "trunk": "resnet32, cut after block 11"}
        ledger.append("extract", settings=settings, metrics=metrics, seconds=time.perf_counter() - started)
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
