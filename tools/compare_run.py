"""Run short fits, replays and digits runs with the krnet on PYTHONPATH; one folder of results a case.

    cases -> krnet -> OUT/CASE/recording.krn, replays.safetensors, result.json     a recording
                      OUT/CASE/run.json, state.krn, recordings                     a run of a learner
                      OUT/CASE/rate.json, points/*.krn                             `krnet bench rate`

tools/compare_commits.sh runs this file, one and the same, with the sources of two commits, and has
tools/compare_results.py compare the folders. A case that fails leaves error.txt in its folder; the others go on.

    PYTHONPATH=src python tools/compare_run.py OUT [CASE ...]
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import krnet
from golden import small

NUM_SAMPLES, NUM_EARLIER = 120, 70
BUDGET = 16_000
FIT = {"iterations": 40}
NETWORK = {**FIT, "d0": 32, "c0": 8, "c1": 8}
PAPER = {**NETWORK, "group_size": 32}
COMPACT = {"step": 0.25, **FIT, "components": 10, "c1": 8}
NO_AXES = {**FIT, "components": 0, "step": 0.1, "c1": 8}
FITTED = ("compact", "paper", "autoencoder")  # recorders that fit a network, and so take iterations
CODED: dict[str, dict[str, Any]] = {
    "quantized": {"step": 0.1},
    "transform": {"step": 0.15},
    "pca": {"step": 0.15},
    "pq": {"parts": 2, "bits": 5, "rate_weight": 0.002},
}
LEARN = {"backbone": "resnet8", "base_epochs": 5, "epochs": 8, "batch_size": 32, "base_lr": 0.05, "lr": 0.05}
KRIL = {"fixed_layers": 3, "recorder_iterations": 25}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune": ("finetune", {}),
    "joint": ("joint", {}),
    "ewc": ("ewc", {}),
    "mas": ("mas", {}),
    "icarl": ("icarl", {"exemplars_per_class": 4}),
    "lucir": ("lucir", {"exemplars_per_class": 4}),
    "gfr": ("gfr", {"gan_epochs": 2, "hidden": 32, "latent": 8}),
    # Without a recorder's name: by default it is the paper's network, and the compact one under a budget.
    "kril": ("kril", KRIL),
    "kril-single": ("kril", {**KRIL, "single": True}),
    "kril-settings": ("kril", {**KRIL, "recorder_settings": "d0=32,c0=8,c1=8,bits=4,code=4"}),
    "kril-budget": ("kril", {**KRIL, "budget": 60_000}),
    "kril-raw": ("kril", {**KRIL, "recorder": "raw"}),
    "kril-images": ("kril", {**KRIL, "recorder": "images"}),
    "kril-images-budget": ("kril", {**KRIL, "recorder": "images", "budget": 30_000}),
    "kril-pca-budget": ("kril", {**KRIL, "recorder": "pca", "budget": 60_000}),
    "kril-quantized": ("kril", {**KRIL, "recorder": "quantized"}),
    "kril-autoencoder-budget": ("kril", {**KRIL, "recorder": "autoencoder", "budget": 80_000}),
}
BENCHED = ["raw", "quantized", "transform", "pca", "pq", "autoencoder", "compact", "paper"]

Case = Callable[[Path], None]
CASES: dict[str, Case] = {}


# ------------------------------------------------------------------ recordings


def options_of(recorder: str) -> dict[str, Any]:
    return small.recorder_options(recorder) if recorder in ("compact", "paper") else {"recorder": recorder}


def record(folder: Path, recorder: str, features: Tensor | Path, labels: Tensor | None, **settings: Any) -> None:
    """Record, open again, and write what comes back."""
    path = folder / "recording.krn"
    krnet.record(features, labels, out=path, device="cpu", **options_of(recorder), **settings)
    recording = krnet.open(path, trunk=settings.get("trunk"))
    replays = {"replays": recording[:]}
    if recording.labels is not None:
        replays["labels"] = recording.labels
    save_file(replays, folder / "replays.safetensors")
    # The error is measured from the features here, and not only read from the header.
    report = krnet.verify(path, features, trunk=settings.get("trunk"))
    info = recording.info()
    kept = {name: info[name] for name in ("num_samples", "shape", "bytes", "mse", "r2", "iterations", "stopped_by")}
    kept |= {f"verify_{name}": report[name] for name in ("mse", "r2", "same_features", "probe_error")}
    (folder / "result.json").write_text(json.dumps(kept, indent=1))


def add(
    name: str, recorder: str, source: Callable[[int], tuple[Tensor, Tensor | None]] = small.maps, **options: Any
) -> None:
    """A case of one recording."""
    CASES[name] = lambda folder: record(folder, recorder, *source(NUM_SAMPLES), **options)


def pictured(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Features of images, labels, and what recorder images is given beside them."""
    images, trunk = small.pictures(num_samples), small.make_trunk()
    labels = small.maps(num_samples)[1]
    options = {"images": images, "trunk": trunk, "mean": small.MEAN, "std": small.STD}
    return small.picture_features(images, trunk), labels, options


def add_images(name: str, **more: Any) -> None:
    def case(folder: Path) -> None:
        features, labels, options = pictured()
        record(folder, "images", features, labels, **options, **more)

    CASES[name] = case


def add_growth(name: str, recorder: str, first: dict[str, Any], then: dict[str, Any]) -> None:
    """A case of two recordings: the first samples, and all of them, starting from that."""

    def case(folder: Path) -> None:
        features, labels = small.maps(NUM_SAMPLES)
        earlier = folder / "earlier.krn"
        part = features[:NUM_EARLIER], labels[:NUM_EARLIER]
        krnet.record(*part, out=earlier, device="cpu", **options_of(recorder), **first)
        record(folder, recorder, features, labels, start=earlier, **then)

    CASES[name] = case


def grow_images(folder: Path, **more: Any) -> None:
    features, labels, options = pictured()
    earlier = folder / "earlier.krn"
    first = {**options, "images": options["images"][:NUM_EARLIER]}
    part = features[:NUM_EARLIER], labels[:NUM_EARLIER]
    before = krnet.record(*part, out=earlier, device="cpu", recorder="images", **first, **more)
    # Features of the samples that the earlier recording holds are its replays.
    features = torch.cat([before[:], features[NUM_EARLIER:]])
    options["images"] = options["images"][NUM_EARLIER:]
    record(folder, "images", features, labels, start=earlier, **options, **more)


def from_file(folder: Path) -> None:
    features, labels = small.maps(NUM_SAMPLES)
    np.save(folder / "features.npy", features.numpy())
    record(folder, "pca", folder / "features.npy", labels, step=0.15)


def make_head() -> nn.Module:
    """Feature maps -> scores of the classes, the same on every call."""
    generator = torch.Generator().manual_seed(3)
    head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 2 * 2, 4))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return head.eval()


def interrupted(folder: Path, recorder: str, **settings: Any) -> None:
    """Stop a fit by Ctrl-C at its second look at the loss, and go on from its checkpoint."""
    features, labels = small.maps(NUM_SAMPLES)
    told = []

    def stop(*progress: Any) -> None:  # one Progress; at older commits, a status and the R2
        if getattr(progress[0], "unit", "iterations") == "iterations":
            told.append(progress)
        if len(told) == 2:
            raise KeyboardInterrupt

    options = {**options_of(recorder), **settings, "device": "cpu", "checkpoint_s": 0.0}
    try:
        krnet.record(features, labels, out=folder / "recording.krn", watch=stop, **options)
    except KeyboardInterrupt:
        record(folder, recorder, features, labels, resume=True, checkpoint_s=0.0, **settings)
        return
    raise AssertionError("the fit ended before it could be interrupted")


def add_recordings() -> None:
    # Fixed settings.
    add("raw", "raw")
    add("raw-float16", "raw", dtype="float16")
    for recorder, settings in CODED.items():
        add(recorder, recorder, **settings)
    add("pq-rotated", "pq", parts=4, bits=4)
    add("autoencoder-floats", "autoencoder", **NETWORK, code_width=12)
    add("autoencoder-bits", "autoencoder", **NETWORK, code_width=12, code_bits=4, weight_bits=5)
    add("compact-axes", "compact", **COMPACT)
    add("compact-no-axes", "compact", **NO_AXES)
    add("compact-no-network", "compact", **{**COMPACT, "c1": 0})
    add("paper", "paper", **PAPER)
    add("paper-sized-by-features", "paper", **FIT)
    add("paper-bits", "paper", **PAPER, bits=4, code=4)
    add("paper-schedule", "paper", **PAPER, schedule="paper")
    add("paper-preset", "paper", iterations=2, preset="cifar100", d0=32, c0=16, group_size=32)
    add_images("images")
    add_images("images-png", codec="png")
    add_images("images-webp", codec="webp", quality=70)
    # The best of a size.
    add("raw-budget", "raw", budget=60_000)
    for recorder in (*CODED, *FITTED):
        add(f"{recorder}-budget", recorder, budget=BUDGET, **(FIT if recorder in FITTED else {}))
    add("compact-small-budget", "compact", budget=7000, **FIT)
    add("paper-bits-budget", "paper", budget=BUDGET, bits=3, code=4, **FIT)
    add_images("images-budget", budget=30_000)
    # Enough samples that a compact network has axes, and one that it also has a network; large maps; a long fit.
    for recorder in CODED:
        add(f"{recorder}-many-budget", recorder, lambda n: small.maps(1500, (8, 6, 6)), budget=40_000)
    add("compact-many-budget", "compact", lambda n: small.maps(1500, (16, 6, 6)), budget=30_000, **FIT)
    add("compact-many-large-budget", "compact", lambda n: small.maps(1500, (16, 6, 6)), budget=120_000, **FIT)
    add("compact-repaired-budget", "compact", lambda n: small.maps(300, (16, 8, 8)), budget=60_000, components=0, **FIT)
    long = {"budget": 40_000, "components": 60, "iterations": 2000, "batch_size": 32}
    add("compact-long-budget", "compact", lambda n: small.maps(400, (8, 6, 6)), **long)
    add("compact-wide-budget", "compact", lambda n: small.maps(60, (40, 16, 16)), budget=60_000, iterations=10)
    add("pca-wide-budget", "pca", lambda n: small.maps(60, (40, 16, 16)), budget=100_000)
    # The smallest that is good enough.
    for recorder in ("quantized", "pca"):
        add(f"{recorder}-target", recorder, target_r2=0.9)
    add("compact-target", "compact", target_r2=0.8, iterations=20)
    add("compact-many-target", "compact", lambda n: small.maps(400, (8, 6, 6)), target_r2=0.8, iterations=20)
    stop = "stop_at_r2" if "stop_at_r2" in inspect.signature(krnet.record).parameters else "target_r2"  # older commits
    add("paper-target", "paper", **{**PAPER, "iterations": 200}, **{stop: 0.3})
    # Growth.
    for recorder, settings in CODED.items():
        add_growth(f"{recorder}-grown", recorder, settings, {})
        room = {"budget": BUDGET, "room": NUM_SAMPLES}
        add_growth(f"{recorder}-grown-budget", recorder, room, {"budget": BUDGET})
    add_growth("compact-axes-grown", "compact", COMPACT, FIT)
    add_growth("compact-no-axes-grown", "compact", NO_AXES, FIT)
    for name, own in (("axes", {"components": 8}), ("no-axes", {"components": 0})):
        first = {**FIT, **own, "budget": BUDGET, "room": NUM_SAMPLES}
        add_growth(f"compact-{name}-grown-budget", "compact", first, {**FIT, "budget": BUDGET})
    add_growth("paper-warm-start", "paper", PAPER, FIT)
    add_growth("paper-bits-warm-start", "paper", {**PAPER, "bits": 4, "code": 4}, FIT)
    CASES["images-grown"] = grow_images
    CASES["images-grown-budget"] = lambda folder: grow_images(folder, budget=25_000)
    # A head, vectors, other labels, features in 16 bits and from a file, an interruption.
    add("compact-head", "compact", **COMPACT, head=make_head())
    add("paper-head", "paper", **PAPER, head=make_head(), gamma=0.01, head_share=0.5)
    add("autoencoder-head", "autoencoder", **NETWORK, code_width=12, head=make_head())
    for recorder, settings in {**CODED, "compact": COMPACT, "paper": PAPER, "autoencoder": NETWORK}.items():
        add(f"{recorder}-vectors", recorder, small.vectors, **settings)
        add(f"{recorder}-mixed-labels", recorder, small.mixed, **settings)
    add("compact-no-labels", "compact", lambda n: (small.mixed(n)[0], None), **COMPACT)
    add("paper-no-labels", "paper", lambda n: (small.mixed(n)[0], None), **PAPER)
    add("raw-of-float16", "raw", lambda n: (small.maps(n)[0].half(), small.maps(n)[1]))
    add("compact-of-float16", "compact", lambda n: (small.maps(n)[0].half(), small.maps(n)[1]), **COMPACT)
    CASES["pca-from-file"] = from_file
    CASES["compact-resumed"] = lambda folder: interrupted(folder, "compact", **{**COMPACT, "iterations": 60})
    CASES["paper-resumed"] = lambda folder: interrupted(folder, "paper", **{**PAPER, "iterations": 60})


# ------------------------------------------------------------------ runs and benches


def add_learner(name: str, method: str, settings: dict[str, Any]) -> None:
    def case(folder: Path) -> None:
        data, shared = small.digits(24, 8), folder.parent / "shared"
        given = {**LEARN, **settings}
        krnet.learn(method, data, small.tasks(), out=folder, settings=given, seed=1, device="cpu", shared=shared)

    CASES[f"learn-{name}"] = case


def class_orders(folder: Path) -> None:
    found = {}
    for name in ("lucir1993", "gfr1993", "icarl", "natural"):
        split = krnet.protocol.split(name, num_classes=100, tasks=10)
        found[name] = {"order": list(split.order), "tasks": [list(task) for task in split.tasks], "hash": split.hash}
    (folder / "result.json").write_text(json.dumps(found))


def bench_rate(folder: Path) -> None:
    features, labels = small.maps(400, (8, 6, 6))  # so many that a compact network has axes at the larger budget
    np.save(folder / "features.npy", features.numpy())
    np.save(folder / "labels.npy", labels.numpy())
    options = [options_of(recorder) for recorder in BENCHED]
    recorders = [":".join([o.pop("recorder"), *(f"{name}={value}" for name, value in o.items())]) for o in options]
    command = [
        sys.executable, "-m", "krnet", "bench", "rate", folder / "features.npy", "--labels", folder / "labels.npy",
        "--budgets", "6kB,20kB", "--iterations", "20", "--recorders", ",".join(recorders), "--device", "cpu",
        "-o", folder, "--json", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")


add_recordings()
for _name, (_method, _settings) in LEARNERS.items():
    add_learner(_name, _method, _settings)
CASES["class-orders"] = class_orders
CASES["bench-rate"] = bench_rate


def main() -> int:
    out, wanted = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    for name in wanted:
        if name not in CASES:
            print(f"no case {name!r}; there are {', '.join(CASES)}", file=sys.stderr)
            return 2
    print(f"krnet of {Path(krnet.__file__).parent}", file=sys.stderr, flush=True)
    for name in wanted:
        folder, started = out / name, time.perf_counter()
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        try:
            CASES[name](folder)
            said = ""
        except Exception:
            said = ", failed"
            (folder / "error.txt").write_text(traceback.format_exc())
        print(f"{name}: {time.perf_counter() - started:.1f} s{said}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
