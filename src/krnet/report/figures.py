"""Draw results; needs matplotlib (extra `plot`).

rate.json            -> draw_rate -> R2 and replay accuracy against log bytes
runs of `krnet demo` -> draw_demo -> accuracy after each task, and against the bytes kept
run.json             -> draw_run  -> accuracy after each task
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krnet.config import require, series_name
from krnet.io.atomic import AnyPath, atomic_write

TICK_SHARES = (-1, 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
COLOURS = (
    "#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0f766e", "#a16207", "#be185d", "#475569", "#65a30d", "#0284c7",
    "#7c2d12",
)  # fmt: skip
MIN_ERROR = 1e-4  # shares above 1 - MIN_ERROR are drawn at this height
MAX_TICKS = 15  # more would overlap
LABEL_GAP = 0.045  # between two names, as a share of the axis


def series_of(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the points by recorder and given settings; the smallest file comes first."""
    series: dict[str, list[dict[str, Any]]] = {}
    for point in result["points"]:
        series.setdefault(series_name(point["recorder"], point["given"]), []).append(point)
    return {name: sorted(points, key=lambda point: point["bytes"]) for name, points in series.items()}


def nines(share: float) -> float:
    """-log10(1 - share): 0.9 -> 1, 0.99 -> 2. A linear axis would draw all good recorders at nearly one height."""
    return -math.log10(max(1 - share, MIN_ERROR))


def draw_rate(path: Path, result: Mapping[str, Any]) -> None:
    """Draw R2 against log bytes and, if there was a head, replay accuracy against log bytes."""
    ticker, Figure = require("matplotlib.ticker", "plot"), require("matplotlib.figure", "plot").Figure

    panels = [("r2", "R²", 1.0)] + ([("replay_accuracy", "replay accuracy (%)", 100.0)] if result["head"] else [])
    figure = Figure(figsize=(5.8 * len(panels), 4.8), dpi=130, layout="constrained")
    figure.suptitle(f"{result['num_samples']:,} features of {'×'.join(map(str, result['shape'])) or 1}", fontsize=13)
    for axes, (key, label, scale) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        line_ends = []
        recorders = list(dict.fromkeys(point["recorder"] for point in result["points"]))
        for name, points in series_of(result).items():
            colour = COLOURS[recorders.index(points[0]["recorder"]) % len(COLOURS)]
            style = "--" if points[0]["given"] else "-"
            x, y = [p["bytes"] / 1e6 for p in points], [nines(p[key]) for p in points]
            axes.plot(x, y, style, marker="o", markersize=4, color=colour, linewidth=1.6)
            line_ends.append((y[-1], x[-1], name, colour))
        if key == "replay_accuracy":
            axes.axhline(nines(result["real_accuracy"]), linestyle="--", color="0.4", linewidth=1.2)
            axes.annotate(
                "real features", (0.01, nines(result["real_accuracy"])), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", color="0.4", fontsize=8,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set(xlabel="file (MB of 10⁶ bytes)", ylabel=label)
        axes.set_yticks([nines(share) for share in TICK_SHARES], [f"{scale * share:g}" for share in TICK_SHARES])
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.05, y=0.08)
        heights = [nines(share) for share in (0.5, 0.9, *(point[key] for point in result["points"]))]
        heights += [nines(result["real_accuracy"])] if key == "replay_accuracy" else []
        axes.set_ylim(min(heights) - 0.1, max(heights) + 0.15)  # matplotlib would include all ticks
        low, high = axes.get_ylim()
        left, right = axes.get_xlim()
        axes.set_xlim(left / 1.1, right * 2.2)  # room for the names, and for markers if there is only one budget
        # Lines that end at about the same bytes form a column; their names are placed from top to bottom.
        lowest_name: dict[int, float] = {}
        for y_end, x_end, name, colour in sorted(line_ends, reverse=True):
            column = round(2 * math.log2(x_end))
            lowest_name[column] = min(lowest_name.get(column, math.inf) - LABEL_GAP * (high - low), y_end)
            axes.annotate(
                name, (x_end, y_end), xytext=(x_end * 1.08, lowest_name[column]), textcoords="data", color=colour,
                fontsize=8.5, va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def draw_demo(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the accuracy after each task, and the last accuracy against the bytes that a method keeps."""
    Figure = require("matplotlib.figure", "plot").Figure

    first = next(iter(runs.values()))
    classes_seen = [sum(first["tasks"][: task + 1]) for task in range(len(first["tasks"]))]
    colours = {"fine-tuning": "0.55", "KRIL": "#c2410c", "KRIL, real features": "#1d4ed8", "all images": "#15803d"}
    styles = {"KRIL, real features": "--"}
    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    figure.suptitle("Handwritten digits, learned two classes at a time; KRIL keeps no old image", fontsize=14)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    for name, run in runs.items():
        values = [100 * value for value in run["accuracy"]]
        left.plot(classes_seen, values, styles.get(name, "-"), marker="o", color=colours[name], label=name)
        stored_mb = run["storage_bytes"]["total"] / 1e6
        right.scatter([stored_mb], [values[-1]], color=colours[name], s=60, zorder=3)
        label_places = {"KRIL": ((-10, -4), "right", "top"), "KRIL, real features": ((6, 8), "center", "bottom")}
        offset, ha, va = label_places.get(name, ((0, 10), "center", "bottom"))
        label = f"{name}\n{stored_mb:.2f} MB"
        right.annotate(
            label, (stored_mb, values[-1]), xytext=offset, textcoords="offset points", ha=ha, va=va, fontsize=9,
            color=colours[name],
        )  # fmt: skip
    left.set(xlabel="classes seen", ylabel="test accuracy on all of them (%)", xticks=classes_seen, ylim=(0, 104))
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


def draw_run(run: Mapping[str, Any], path: AnyPath | None = None) -> Any:
    """Draw the accuracy of a run after each task; return the figure and, with `path`, also write it as a PNG file."""
    Figure = require("matplotlib.figure", "plot").Figure

    figure = Figure(figsize=(5.8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    seen = [sum(run["tasks"][: task + 1]) for task in range(len(run["tasks"]))]
    points = [(number, 100 * value) for number, value in zip(seen, run["accuracy"]) if value is not None]
    axes.plot(*zip(*points), marker="o", color=COLOURS[0], clip_on=False)
    axes.annotate(f"{points[-1][1]:.1f}", points[-1], xytext=(0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="classes seen", ylabel="test accuracy on all of them (%)", ylim=(0, 104))
    axes.set_title(f"{run['method']} on {run.get('data', 'images')}")
    if len(seen) <= MAX_TICKS:
        axes.set_xticks(seen)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

    def png() -> bytes:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        return buffer.getvalue()

    figure._repr_png_ = png  # a notebook shows a figure by itself only after pyplot was used
    if path is not None:
        with atomic_write(path) as file:
            file.write(png())
    return figure
