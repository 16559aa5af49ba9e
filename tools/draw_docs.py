"""Draw the pictures of README and docs/ from the newest rows of recipes.

    results/ledger.jsonl, recipes -> PICTURES: name -> numbers -> docs/NAME.png

    python tools/draw_docs.py            # draws those whose numbers have changed
    python tools/draw_docs.py --check    # draws nothing; exit code 1 and the file's name if a picture is out of date

A PNG carries a digest of the numbers it shows: matplotlib of another version draws the same numbers a little otherwise,
and that is no reason to draw a picture again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fill_docs
from matplotlib.figure import Figure
from PIL import Image

from krnet.report import figures
from krnet.report.spread import summarize
from krnet.report.tables import rounded

DOCS = fill_docs.ROOT / "docs"
DIGEST_KEY = "Numbers"
Numbers = dict[str, Any]

# Series of recipe `accuracy` -> its name in the picture, colour, and where the name stands (points right, points up).
STORY: Mapping[str, tuple[str, str, tuple[int, int]]] = {
    "KRIL": ("KRIL", "#c2410c", (-10, 8)),
    "DS-AL": ("DS-AL, matrices", "#7e22ce", (-10, -4)),
    "FeCAM": ("FeCAM, covariances", "#0f766e", (10, -4)),
    "FeTrIL": ("FeTrIL, class means", "#a16207", (10, -4)),
    "LUCIR": ("LUCIR, 20 images a class", "#1d4ed8", (10, -4)),
    "joint": ("all images", "#15803d", (0, 10)),
}
RATE_LINES = ("krnet", "autoencoder", "pca", "transform", "quantized", "pq", "images, through the trunk again")
FITS = {
    "cifar100-default": ("krnet's schedule\n(Muon and Adam)", "#c2410c", 0, (-8, 0), "center"),
    "cifar100-paper-setting": ("the paper's schedule\n(Adam)", "#1d4ed8", -1, (8, -12), "top"),
}


# ------------------------------------------------------------------ accuracy against bytes


def bytes_numbers() -> Numbers:
    """Line -> [[megabytes, percent] of each run] of every point, by the name of the run."""
    lines: dict[str, dict[str, list[list[float]]]] = {}
    for entry in fill_docs.recipe_entries("accuracy", fill_docs.LEDGER):
        if entry.sized.series in STORY:
            metrics = entry.row["metrics"]
            place = [metrics["storage_bytes"]["total"] / 1e6, 100 * metrics["last"]]
            lines.setdefault(entry.sized.series, {}).setdefault(entry.series, []).append(place)
    return lines


def draw_bytes(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(8, 4.4), dpi=200, layout="constrained")
    axes = figure.subplots()
    for line, points in numbers.items():
        name, colour, offset = STORY[line]
        spots = []
        for runs in points.values():
            sizes, shares = zip(*runs, strict=True)
            last = summarize(line, shares)
            spots.append((sum(sizes) / len(sizes), last.mean, last.deviation or 0.0))
        x, y, deviations = zip(*sorted(spots), strict=True)
        ours = line == "KRIL"
        axes.errorbar(x, y, deviations, fmt="o-", color=colour, markersize=9 if ours else 7, linewidth=2.8, capsize=3)
        right, _ = offset
        text = f"{name} {rounded(round(y[-1], 6), 1)} %"
        axes.annotate(
            text, (x[-1], y[-1]), xytext=offset, textcoords="offset points", color=colour, fontsize=15 if ours else 12,
            fontweight="bold" if ours else "normal", ha="left" if right > 0 else "right" if right else "center",
        )  # fmt: skip
    axes.set(xscale="log", xlim=(0.015, 4000), ylim=(50, 75))
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["100 kB", "1 MB", "10 MB", "100 MB", "1 GB"], fontsize=11)
    axes.set_xlabel("bytes kept of old classes", fontsize=12)
    axes.set_title("right answers on 100 classes, after ten tasks (%)", loc="left", fontsize=13)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# ------------------------------------------------------------------ the rate of every recorder


def rate_numbers() -> Numbers:
    """As krnet.bench.rate writes them: points with recorder, bytes, R2 and replay accuracy."""
    points = []
    for entry in fill_docs.recipe_entries("rate", fill_docs.LEDGER):
        if entry.line in RATE_LINES:
            metrics, name = entry.row["metrics"], entry.line.split(",")[0]
            shown = {key: metrics[key] for key in ("bytes", "r2", "replay_accuracy", "real_accuracy")}
            points.append({"recorder": name, "given": {}, "budget": entry.row["settings"]["budget"], **shown})
    real = {point.pop("real_accuracy") for point in points}
    assert len(real) == 1, f"rows of {len(real)} sets of features: real accuracies {real}"
    return {"points": points, "real_accuracy": real.pop(), "head": "F2", "num_samples": 25_000, "shape": [64, 8, 8]}


def draw_rate(numbers: Numbers) -> Figure:
    return figures.rate_figure(numbers, title=f"{numbers['num_samples']:,} feature maps, kept by each recorder")


# ------------------------------------------------------------------ two fits of the paper's network


def fit_numbers() -> Numbers:
    """Recipe -> the curve of R2 of its newest row, and where the fit ends."""
    found = {}
    for recipe in FITS:
        metrics = fill_docs.find(fill_docs.results(), recipe)["metrics"]
        found[recipe] = {
            "curve": [[step, r2] for step, _, r2 in metrics["curve"] if r2 > 0],
            "end": [metrics["iterations"], metrics["r2"]],
        }
    return found


def draw_fit(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(8, 4), dpi=200, layout="constrained")
    axes = figure.subplots()
    for recipe, (label, colour, place, offset, va) in FITS.items():
        curve = numbers[recipe]["curve"]
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=2.5)
        axes.plot(*numbers[recipe]["end"], "o", color=colour, markersize=8)
        axes.annotate(
            label, curve[place], xytext=offset, textcoords="offset points", ha="right", va=va, color=colour, fontsize=12
        )  # fmt: skip
    ends = [f"{r2:.3f} after {steps:,} iterations" for steps, r2 in (numbers[recipe]["end"] for recipe in FITS)]
    axes.set_title(f"R² {', '.join(ends)}", fontsize=14, fontweight="bold", pad=12)
    axes.set(xscale="log", ylim=(0.5, 1))
    axes.set_xlabel("iterations", fontsize=12)
    axes.set_ylabel("R² of replayed features", fontsize=12)
    axes.set_xticks([300, 1000, 3000, 10_000, 30_000], ["300", "1,000", "3,000", "10,000", "30,000"], fontsize=11)
    axes.minorticks_off()
    axes.margins(x=0.15)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES: dict[str, tuple[Callable[[], Numbers], Callable[[Numbers], Figure]]] = {
    "bytes": (bytes_numbers, draw_bytes),
    "rate": (rate_numbers, draw_rate),
    "fit": (fit_numbers, draw_fit),
}


# ------------------------------------------------------------------ files


def digest(numbers: Numbers) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def shown_digest(path: Path) -> str | None:
    """The digest of the numbers that a picture shows; None if there is no picture."""
    if not path.exists():
        return None
    with Image.open(path) as picture:
        return str(picture.info.get(DIGEST_KEY))


def stale_pictures(folder: Path) -> dict[str, Numbers]:
    """Names of pictures that show other numbers than the newest rows -> those numbers."""
    numbers = {name: read() for name, (read, _) in PICTURES.items()}
    return {name: own for name, own in numbers.items() if shown_digest(folder / f"{name}.png") != digest(own)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; fail if a picture is out of date")
    args = parser.parse_args()
    stale = stale_pictures(DOCS)
    for name, numbers in stale.items():
        path = DOCS / f"{name}.png"
        if args.check:
            print(f"docs/{path.name}: shows other numbers than the newest rows. Run: python tools/draw_docs.py")
        else:
            _, draw = PICTURES[name]
            draw(numbers).savefig(path, metadata={DIGEST_KEY: digest(numbers)})
            print(f"docs/{path.name}: drawn")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
