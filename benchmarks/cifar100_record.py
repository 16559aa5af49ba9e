"""Record the base-task features of CIFAR-100 and append size, error and replay accuracy to the ledger.

    runs/base/{features,labels}.npy, network.safetensors -> krnet.record -> file -> R2, replay accuracy -> ledger

Replay accuracy is the share of replayed training features that the head F2 of the base network classifies correctly;
for the real features it is 99.7 %. --preset selects recorder paper, the paper's network; the default is
krnet, the compact one. Other recorders: --set recorder=NAME.

    python benchmarks/cifar100_base.py --data-dir DIR --out runs/base          # once
    python benchmarks/cifar100_record.py runs/base --preset cifar100 --schedule paper
    python benchmarks/cifar100_record.py runs/base --preset cifar100 --iterations 6000
"""

import argparse
import ast
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from cifar100_base import apply_in_batches, resnet32
from safetensors.torch import load_file

import krnet
from krnet import errors
from krnet.io import ledger


def accuracy(head, features, labels):
    return (apply_in_batches(head, features).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder written by cifar100_base.py")
    parser.add_argument("--preset", help="network sizes of the paper, such as cifar100 (none)")
    parser.add_argument("--schedule", default="fast", help="fast or paper (%(default)s)")
    parser.add_argument("--iterations", type=int, help="updates (the schedule's number)")
    parser.add_argument("--stop-at-r2", type=float, help="stop the fit at this R2 (none)")
    parser.add_argument("--time-budget", type=float, help="seconds after which the fit stops (none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (%(default)s)")
    parser.add_argument("--limit", type=int, help="number of samples to record (all)")
    parser.add_argument("--kr2", action="store_true", help="add L_kr2, through the head without its classifier")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting")
    parser.add_argument(
        "--recipe", default="cifar100-record", help="name of the experiment in the ledger (%(default)s)"
    )
    args = parser.parse_args()
    ledger.commit()  # looked up now: the source may change before the run ends

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    features = np.load(args.base / "features.npy", mmap_mode="r")[: args.limit]
    labels = np.load(args.base / "labels.npy")[: args.limit]
    trunk, head = resnet32(50)
    nn.Sequential(trunk, head).load_state_dict(load_file(args.base / "network.safetensors"))
    head.to(device).eval()
    settings = dict(item.split("=", 1) for item in args.set)
    settings = {k: ast.literal_eval(v) if v[:1] in "-.0123456789TF" else v for k, v in settings.items()}
    settings |= {"preset": args.preset, "schedule": args.schedule, "iterations": args.iterations}
    settings |= {"stop_at_r2": args.stop_at_r2, "time_budget": args.time_budget}

    curve, last_s = [], 0.0

    def watch(progress):
        nonlocal last_s
        if progress.unit == "iterations" and (progress.seconds - last_s > 10 or progress.share == 1):
            last_s = progress.seconds
            curve.append([progress.done, round(progress.seconds, 1), round(progress.values["R2"], 4)])
            print(*curve[-1], flush=True)

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cifar100.krn"
        metrics, outcome = {}, "ok"
        try:
            krnet.record(
                features,
                labels,
                out=path,
                seed=args.seed,
                head=head[:-1] if args.kr2 else None,
                watch=watch,
                **settings,
            )
            recording = krnet.open(path, device)
            info = recording.info()
            truth = torch.from_numpy(labels).to(device)
            metrics = {k: info[k] for k in ("mse", "r2", "bytes", "iterations", "fit_seconds", "fast_extra_mse")}
            metrics["ms_per_iteration"] = 1e3 * info["fit_seconds"] / info["iterations"]
            metrics["replay_accuracy"] = accuracy(head, recording[:], truth)
            metrics["real_accuracy"] = accuracy(head, torch.from_numpy(np.array(features)).to(device), truth)
            groups = {"groups": len(info["settings"]["groups"])} if "groups" in info["settings"] else {}
            settings["network"] = info["settings"] | groups
        except errors.FitError as error:
            outcome = f"failed: {error}"
        row = ledger.append(
            args.recipe,
            settings={**settings, "samples": len(features), "kr2": args.kr2},
            metrics={**metrics, "curve": [[i, s, r] for i, s, r in curve if math.isfinite(r)]},
            seconds=time.perf_counter() - started,
            seed=args.seed,
            class_order="lucir1993",
            outcome=outcome,
            files=[path] if path.exists() else [],
        )
    print(json.dumps({"settings": row["settings"], "metrics": metrics, "outcome": outcome}))


if __name__ == "__main__":
    main()
