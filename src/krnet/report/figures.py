"""Pictures of results.

rate.json -> draw_rate -> log bytes against R2 and replay accuracy
runs of `krnet demo` -> draw_demo -> accuracy after each task, and against bytes kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krnet.config import require, series_name
from krnet.io.atomic import atomic_write

MARKS = (-1, 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0f766e", "#a16207", "#be185d", "#475569", "#65a30d", "#0284c7")


def series_of(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Points by recorder and the settings that were given, the smallest file first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for point in result["points"]:
        found.setdefault(series_name(point["recorder"], point["given"]), []).append(point)
    return {name: sorted(points, key=lambda point: point["bytes"]) for name, points in found.items()}


def nines(share: float) -> float:
    """0.9 -> 1, 0.99 -> 2: what is missing tells recorders apart that all come close to 1."""
    return -math.log10(max(1 - share, 1e-4))


def draw_rate(path: Path, result: Mapping[str, Any]) -> None:
    """Log bytes against R2 and, with a head, against replay accuracy."""
    ticker, Figure = require("matplotlib.ticker", "plot"), require("matplotlib.figure", "plot").Figure

    panels = [("r2", "R²", 1.0)] + ([("replay_accuracy", "replay accuracy (%)", 100.0)] if result["head"] else [])
    figure = Figure(figsize=(5.8 * len(panels), 4.8), dpi=130, layout="constrained")
    figure.suptitle(f"{result['num_samples']:,} features of {'×'.join(map(str, result['shape'])) or 1}", fontsize=13)
    for axes, (key, label, scale) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        ends = []
        known = list(dict.fromkeys(point["recorder"] for point in result["points"]))
        for name, points in series_of(result).items():
            colour = COLOURS[known.index(points[0]["recorder"]) % len(COLOURS)]
            style = "--" if points[0]["given"] else "-"
            x, y = [p["bytes"] / 1e6 for p in points], [nines(p[key]) for p in points]
            axes.plot(x, y, style, marker="o", markersize=4, color=colour, linewidth=1.6)
            ends.append((y[-1], x[-1], name, colour))
        if key == "replay_accuracy":
            axes.axhline(nines(result["real_accuracy"]), linestyle="--", color="0.4", linewidth=1.2)
            axes.annotate(
                "real features", (0.01, nines(result["real_accuracy"])), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", color="0.4", fontsize=8,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set(xlabel="file (MB of 10⁶ bytes)", ylabel=label)
        axes.set_yticks([nines(mark) for mark in MARKS], [f"{scale * mark:g}" for mark in MARKS])
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.05, y=0.08)
        drawn = [nines(share) for share in (0.5, 0.9, *(point[key] for point in result["points"]))]
        drawn += [nines(result["real_accuracy"])] if key == "replay_accuracy" else []
        axes.set_ylim(min(drawn) - 0.1, max(drawn) + 0.15)  # marks beyond it would widen it
        low, high = axes.get_ylim()
        left, right = axes.get_xlim()
        axes.set_xlim(left / 1.1, right * 2.2)  # room for names, and for markers where there is one budget only
        taken: dict[int, float] = {}  # the lowest name so far beside lines that end at about the same bytes
        for y_end, x_end, name, colour in sorted(ends, reverse=True):
            column = round(2 * math.log2(x_end))
            taken[column] = min(taken.get(column, math.inf) - 0.045 * (high - low), y_end)
            axes.annotate(
                name, (x_end, y_end), xytext=(x_end * 1.08, taken[column]), textcoords="data", color=colour,
                fontsize=8.5, va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def draw_demo(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy after each task; and where each method ends, against the bytes it keeps."""
    Figure = require("matplotlib.figure", "plot").Figure

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
