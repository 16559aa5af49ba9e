"""Record features with the rivals of KRNet, reopen each file, and append its bytes and its R2 to the ledger.

    runs/base/{features,labels}.npy -> krnet.record -> file -> krnet.open -> bytes by stat, R2, MSE -> ledger

A point is a recorder and its settings; without any, those that measured.md has figures for, at the same R2. Where the
folder has a network.safetensors, its head reads the replays, too (replay accuracy).

    python benchmarks/rate_rivals.py runs/base
    python benchmarks/rate_rivals.py runs/base quantized:step=0.1 pca:step=0.2,components=512 raw:dtype=float16
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import krnet
from krnet import ledger
from krnet.parallel import pick_device
from krnet.typed import parse_setting

# Steps that reach the R2 of measured.md: quantized 0.983 0.961 0.921 0.847; pca 0.814 0.712 0.596 0.482; transform
# 0.850 0.762 0.651 0.521.
POINTS = [
    "quantized:step=0.06", "quantized:step=0.09", "quantized:step=0.13", "quantized:step=0.18",
    "pca:step=0.19,components=512", "pca:step=0.26,components=256", "pca:step=0.31,components=128",
    "pca:step=0.36,components=64", "pca:step=0.31", "pca:step=0.17", "pca:step=0.11",
    "transform:step=0.183", "transform:step=0.252", "transform:step=0.351", "transform:step=0.503",
]  # fmt: skip


def parse_point(text: str) -> tuple[str, dict]:
    recorder, _, settings = text.partition(":")
    return recorder, dict(parse_setting(item) for item in settings.split(",") if item)


def read_head(base: Path, device: torch.device):
    """The base network's head, or None where the folder has no network."""
    if not (base / "network.safetensors").exists():
        return None
    from cifar100_base import resnet32
    from safetensors.torch import load_file

    trunk, head = resnet32(50)
    torch.nn.Sequential(trunk, head).load_state_dict(load_file(base / "network.safetensors"))
    return head.to(device).eval()


@torch.inference_mode()
def replay(recording: krnet.Recording, head, labels: np.ndarray) -> dict:
    """One pass over all samples in order: their number a second, and how many the head still gets right."""
    right, seconds = 0, 0.0
    for ids in torch.arange(len(recording)).split(1024):
        started = time.perf_counter()
        batch = recording.replay(ids)
        if recording.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - started
        if head is not None:
            right += int((head(batch).argmax(1).cpu() == torch.from_numpy(labels[ids.numpy()])).sum())
    measured = {"replay_per_second": len(recording) / seconds}
    return measured if head is None else measured | {"replay_accuracy": right / len(recording)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="folder with features.npy and labels.npy")
    parser.add_argument("points", nargs="*", default=POINTS, metavar="RECORDER:NAME=VALUE,...")
    parser.add_argument("--limit", type=int, help="record only so many samples")
    parser.add_argument("--no-labels", action="store_true", help="leave the labels out of the file")
    parser.add_argument("--device")
    args = parser.parse_args()
    ledger.commit()  # of the code that runs, not of what it has become by the end

    device = pick_device(args.device)
    features = np.load(args.base / "features.npy", mmap_mode="r")[: args.limit]
    labels = np.load(args.base / "labels.npy")[: args.limit]
    head = read_head(args.base, device)
    for recorder, settings in map(parse_point, args.points):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{recorder}.krn"
            kept = None if args.no_labels else labels
            krnet.record(features, kept, recorder=recorder, out=path, device=args.device, **settings)
            recording = krnet.open(path, device)
            checked = krnet.verify(path, features, device=str(device))
            metrics = {"bytes": path.stat().st_size, "r2": checked["r2"], "mse": checked["mse"]}
            metrics["fit_seconds"] = recording.info()["fit_seconds"]
            metrics |= replay(recording, head, labels)
            row = ledger.append(
                "rate-rivals",
                settings={"recorder": recorder, **recording.settings, "samples": len(features)},
                metrics=metrics,
                seconds=time.perf_counter() - started,
                seed=0,
                class_order="lucir1993",
                files=[path],
            )
        print(json.dumps({"settings": row["settings"], "metrics": metrics}), flush=True)


if __name__ == "__main__":
    main()
