"""The whole of it on real data, in minutes and without a download: handwritten digits, learned task after task.

    digits 0..9 in an order of their own: 4 classes, then 3 tasks of 2 -> KRIL -> accuracy after each task, bytes
    the same by fine-tuning (lower bound), on all images (upper), and by KRIL with the real features in memory
                                                                       -> demo.png, DIR/METHOD/run.json

Data: scikit-learn's digits (UCI, Alpaydin and Kaynak 1998), shipped with the package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krnet import data
from krnet import task_loop as learning
from krnet.cli.progress import Display, Line
from krnet.data import protocol
from krnet.io.atomic import atomic_write

# Small on purpose, and fitted with small batches: many quick updates suit a few minutes on two cores.
RECORDER = "group_size=64,d0=96,c0=48,c1=32,stride=2,batch_size=200"
NETWORK: dict[str, Any] = {"backbone": "resnet8", "batch_size": 64, "base_epochs": 20, "epochs": 20}
KRIL: dict[str, Any] = {"fixed_layers": 5, "recorder_iterations": 250, "recorder_settings": RECORDER, "scaled": False}
# Name in the table and the picture, method, its settings.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("fine-tuning", "finetune", {}),
    ("KRIL", "kril", KRIL),
    ("KRIL, real features", "kril", {"fixed_layers": 5, "recorder": "raw"}),
    ("all images", "joint", {}),
)
SHORT: dict[str, Any] = {"base_epochs": 3, "epochs": 2}


def run(out: Path, display: Display, *, seed: int = 0, short: bool = False) -> dict[str, Any]:
    """Learn the digits four ways; writes a folder for each and demo.png in `out`, and returns the runs."""
    started = time.perf_counter()
    display.phase("reading the digits")
    digits = data.load("digits")
    split = protocol.split("lucir1993", num_classes=10, base_classes=4, tasks=3)
    runs = {}
    for name, method, own in RUNS:
        settings = {**NETWORK, **own, **(SHORT if short else {})}
        if short and "recorder_iterations" in settings:
            settings["recorder_iterations"] = 10
        folder = out / name.replace(",", "").replace(" ", "-").lower()
        # Begun before and not finished: taken up. Finished with these settings: shown as it is.
        runs[name] = learning.learn(
            method, digits, split, out=folder, settings=settings, seed=seed, device="cpu", shared=out / "shared",
            resume=True, watcher=Line(display),
        )  # fmt: skip
    display.phase("drawing")
    picture = out / "demo.png"
    draw(picture, runs)
    return {"runs": runs, "picture": str(picture), "seconds": time.perf_counter() - started}


def draw(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy after each task; and where each method ends, against the bytes it keeps."""
    from matplotlib.figure import Figure  # half a second to import

    first = next(iter(runs.values()))
    seen = [sum(first["tasks"][: task + 1]) for task in range(len(first["tasks"]))]
    colours = {"fine-tuning": "0.55", "KRIL": "#c2410c", "KRIL, real features": "#1d4ed8", "all images": "#15803d"}
    styles = {"KRIL, real features": "--"}
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    figure.suptitle("Handwritten digits, learned two classes at a time; KRIL keeps no old image", fontsize=14)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    for name, found in runs.items():
        values = [100 * value for value in found["accuracy"]]
        left.plot(seen, values, styles.get(name, "-"), marker="o", color=colours[name], label=name)
        stored = found["storage_bytes"]["total"] / 1e6
        right.scatter([stored], [values[-1]], color=colours[name], s=60, zorder=3)
        place = {"KRIL": ((-10, -4), "right", "top"), "KRIL, real features": ((6, 8), "center", "bottom")}
        offset, ha, va = place.get(name, ((0, 10), "center", "bottom"))
        label = f"{name}\n{stored:.2f} MB"
        right.annotate(
            label, (stored, values[-1]), xytext=offset, textcoords="offset points", ha=ha, va=va, fontsize=9,
            color=colours[name],
        )  # fmt: skip
    left.set(xlabel="classes seen", ylabel="test accuracy on all of them (%)", xticks=seen, ylim=(0, 104))
    left.legend(frameon=False, loc="lower left")
    right.set(xlabel="bytes kept between tasks (MB)", ylabel="accuracy after the last task (%)", ylim=(0, 119))
    right.set_yticks(range(0, 101, 20))
    right.set_xscale("symlog", linthresh=0.05)
    right.set_xlim(-0.02, 20)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
