"""Run `krnet bench rate` on the feature maps of the base task and append every new point to the ledger.

    runs/base/network.safetensors -> DIR/head.pt, DIR/trunk.pt
    these and runs/base/{features,labels,images}.npy -> krnet.bench.rate -> DIR/rate.json, DIR/rate.png, ledger rows

A row is appended as soon as its point is made. --measured uses fixed settings instead of budgets, those of our first
reference measurements: quantisation steps of quantized and transform, numbers of principal components, parts of pq.

    python benchmarks/rate.py runs/base -o runs/rate --budgets 1.3MB,3.3MB,6.5MB,12.3MB,24MB
    python benchmarks/rate.py runs/base -o runs/rate-measured --measured
"""

import argparse
import time
from pathlib import Path

import torch
from cifar100_base import MEAN, STD, resnet32
from safetensors.torch import load_file

from krnet.bench import rate
from krnet.cli.output import show_rate
from krnet.cli.progress import show_progress
from krnet.config import parse_duration, parse_sizes
from krnet.io import ledger
from krnet.report.figures import draw_rate

PLAIN = "dead_zone=0.5:centroid=0"  # round to the nearest step, and decode to the middle of the bin
NO_LIMIT = "1GB"  # a budget that no fixed setting reaches
MEASURED = [
    *(f"quantized:step={step:.6f}:{PLAIN}" for step in (1 / 15, 1 / 10, 1 / 7, 1 / 5)),
    *(f"transform:step={step}:{PLAIN}" for step in (0.18, 0.25, 0.35, 0.5)),
    # With k components this step gives the same R2 as 8 bits per coefficient.
    *(f"pca:components={k}:step={step}" for k, step in ((512, 0.19), (256, 0.26), (128, 0.31), (64, 0.36))),
    *(f"pq:parts={parts}:bits=8:rotations=0" for parts in (16, 8, 4, 2)),
]  # fmt: skip


def write_network(base: Path, out: Path) -> tuple[Path | None, Path | None]:
    """Write the trunk and the head of the base network as TorchScript; return None if the folder has no network."""
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
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--budgets", default="3MB,6.5MB,12MB,24MB", help="largest sizes of a file (%(default)s)")
    parser.add_argument("--recorders", help="NAME,NAME:SETTING=VALUE,... (all)")
    parser.add_argument("--measured", action="store_true", help="fixed settings instead of budgets")
    parser.add_argument("--iterations", type=int, help="updates of each fit (the schedule's number)")
    parser.add_argument("--time-budget", type=parse_duration, help="longest fit: seconds, or 10m (none)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (cuda if there is one)")
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends

    common = {"iterations": args.iterations, "time_budget": args.time_budget}
    started = time.perf_counter()

    def append_point(point):
        """Append a row at once: the points after it may take long, or be stopped."""
        names = ("recorder", "settings", "budget", "given", "versions", "device", "file", "num_samples")
        metrics = {name: value for name, value in point.items() if name not in names} | {"device": point["device"]}
        settings = (
            {name: point[name] for name in ("recorder", "given", "budget", "num_samples")} | common | point["settings"]
        )
        ledger.append("rate", settings=settings, metrics=metrics, seconds=point["seconds"], seed=0,
                      class_order="lucir1993", files=[args.out / point["file"]])  # fmt: skip

    recorders = MEASURED if args.measured else args.recorders.split(",") if args.recorders else None
    trunk, head = write_network(args.base, args.out)
    has_images = recorders is None or any(name.split(":")[0] == "images" for name in recorders)
    image_inputs = {}
    if has_images and trunk is not None and (args.base / "images.npy").exists():
        image_inputs = {"images": args.base / "images.npy", "trunk": trunk, "settings": {"mean": MEAN, "std": STD}}
    result = rate.bench(
        args.base / "features.npy", args.base / "labels.npy", out=args.out, head=head, recorders=recorders,
        budgets=[NO_LIMIT] if args.measured else parse_sizes(args.budgets), **image_inputs,
        iterations=args.iterations, time_budget=args.time_budget, device=args.device, made=append_point,
        watch=show_progress,
    )  # fmt: skip
    if result["points"]:
        draw_rate(args.out / rate.PICTURE_FILE, result)
    for failed in result["errors"]:
        seconds, outcome = time.perf_counter() - started, failed["error"]
        ledger.append("rate", settings=common | failed, metrics={}, seconds=seconds, seed=0, outcome=outcome)
    show_rate(result)


if __name__ == "__main__":
    main()
