"""Run `krnet bench rate` on the maps of the base task and append every point that it made to the ledger.

    runs/base/{features,labels,images}.npy, network.safetensors -> head.pt, trunk.pt
    all of them -> krnet.rate.bench -> DIR/rate.json -> ledger

A row is appended as soon as its point is made; points that DIR held already have theirs. --measured records with the
fixed settings that our anchors were measured with, instead of at budgets: steps of a plain quantiser, of a transform,
numbers of principal components, bytes of a position.

    python benchmarks/rate.py runs/base -o runs/rate --budgets 1.3MB,3.3MB,6.5MB,12.3MB,24MB
    python benchmarks/rate.py runs/base -o runs/rate-measured --measured
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from cifar100_base import MEAN, STD, resnet32
from safetensors.torch import load_file

from krnet.bench import rate
from krnet.cli.output import show_rate
from krnet.config import parse_duration, parse_sizes
from krnet.io import ledger

PLAIN = "dead_zone=0.5:centroid=0"  # rounded to the nearest, read back in the middle of a bin
MEASURED = [
    *(f"quantized:step={step:.6f}:{PLAIN}" for step in (1 / 15, 1 / 10, 1 / 7, 1 / 5)),
    *(f"transform:step={step}:{PLAIN}" for step in (0.18, 0.25, 0.35, 0.5)),
    # Steps at which so many components reach what they reach with 8 bits.
    *(f"pca:components={k}:step={step}" for k, step in ((512, 0.19), (256, 0.26), (128, 0.31), (64, 0.36))),
    *(f"pq:parts={parts}:bits=8:rotations=0" for parts in (16, 8, 4, 2)),
]  # fmt: skip


def write_network(base: Path, out: Path) -> tuple[Path | None, Path | None]:
    """The base network's trunk and head as TorchScript; None where the folder has no network."""
    if not (base / "network.safetensors").exists():
        return None, None
    paths = out / "trunk.pt", out / "head.pt"
    trunk, head = resnet32(50)
    torch.nn.Sequential(trunk, head).load_state_dict(load_file(base / "network.safetensors"))
    out.mkdir(parents=True, exist_ok=True)
    for module, path in zip((trunk, head), paths):
        if not path.exists():
            torch.jit.script(module.eval()).save(path)
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder written by cifar100_base.py")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--budgets", default="3MB,6.5MB,12MB,24MB")
    parser.add_argument("--recorders", help="NAME,NAME:SETTING=VALUE,...; by default all")
    parser.add_argument("--measured", action="store_true", help="fixed settings instead of budgets")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--time-budget", type=parse_duration)
    parser.add_argument("--device")
    args = parser.parse_args()
    ledger.commit()  # of the code that runs, not of what it has become by the end

    common = {"iterations": args.iterations, "time_budget": args.time_budget}
    started = time.perf_counter()

    def made(point):
        """A row at once: what comes after it may take long, or be stopped."""
        names = ("recorder", "settings", "budget", "given", "versions", "device", "file", "num_samples")
        metrics = {name: value for name, value in point.items() if name not in names} | {"device": point["device"]}
        settings = (
            {name: point[name] for name in ("recorder", "given", "budget", "num_samples")} | common | point["settings"]
        )
        ledger.append("rate", settings=settings, metrics=metrics, seconds=point["seconds"], seed=0,
                      class_order="lucir1993", files=[args.out / point["file"]])  # fmt: skip

    recorders = MEASURED if args.measured else args.recorders.split(",") if args.recorders else None
    trunk, head = write_network(args.base, args.out)
    wanted = recorders is None or any(name.split(":")[0] == "images" for name in recorders)
    pictures = {}
    if wanted and trunk is not None and (args.base / "images.npy").exists():
        pictures = {"images": args.base / "images.npy", "trunk": trunk, "settings": {"mean": MEAN, "std": STD}}
    found = rate.bench(
        args.base / "features.npy", args.base / "labels.npy", out=args.out, head=head, recorders=recorders, **pictures,
        budgets=["1GB"] if args.measured else parse_sizes(args.budgets),
        iterations=args.iterations, time_budget=args.time_budget, device=args.device, made=made,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    for failed in found["errors"]:
        seconds, outcome = time.perf_counter() - started, failed["error"]
        ledger.append("rate", settings=common | failed, metrics={}, seconds=seconds, seed=0, outcome=outcome)
    show_rate(found)


if __name__ == "__main__":
    main()
