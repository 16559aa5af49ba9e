"""Draw results as PNG files; needs matplotlib (extra `plot`).

rate.json            -> draw_rate -> R2 and replay accuracy against log bytes
runs of `krnet demo` -> draw_demo -> accuracy after each task, and the bytes kept
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krnet.config import require, series_name
from krnet.io.atomic import atomic_write

TICK_SHARES = (-1, 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)
COLOURS = (
    "#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#0f766e", "#a16207", "#be185d", "#475569", "#65a30d", "#0284c7",
    "#7c2d12",
)  # fmt: skip
MIN_ERROR = 1e-4  # shares above 1 - MIN_ERROR are drawn at this height
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


DEMO_COLOURS = {"fine-tuning": "0.45", "KRIL": "#c2410c", "all images": "#15803d"}
DEMO_FONT = {"font.size": 17, "axes.titlesize": 18, "axes.labelsize": 17}  # to be read at half size


def draw_demo(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the accuracy after each task as lines, and the bytes kept between tasks as bars."""
    matplotlib, Figure = require("matplotlib", "plot"), require("matplotlib.figure", "plot").Figure

    with matplotlib.rc_context(DEMO_FONT):
        figure = Figure(figsize=(12, 5.4), dpi=130, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.08)
        kril_kb, images_kb = (runs[name]["storage_bytes"]["total"] / 1e3 for name in ("KRIL", "all images"))
        figure.suptitle(
            f"KRIL remembers old digits in {kril_kb:.0f} kB; keeping all images takes {images_kb:.0f} kB",
            fontsize=21, fontweight="bold",
        )  # fmt: skip
        left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
        _draw_demo_accuracy(left, runs)
        _draw_demo_bytes(right, runs)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            figure.savefig(file, format="png")


def _draw_demo_accuracy(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """A line per method with its name and last accuracy at the end."""
    gap = 10  # between two names, in points of accuracy
    first = next(iter(runs.values()))
    classes_seen = [sum(first["tasks"][: task + 1]) for task in range(len(first["tasks"]))]
    place = math.inf
    for name, run in sorted(runs.items(), key=lambda item: item[1]["last"], reverse=True):
        values, colour = [100 * value for value in run["accuracy"]], DEMO_COLOURS[name]
        axes.plot(classes_seen, values, marker="o", markersize=9, linewidth=3.5, color=colour, clip_on=False)
        # Names are placed from top to bottom, so that lines that end together do not share a place.
        place = min(place - gap, values[-1] + (3 if place == math.inf else 0))
        axes.annotate(
            f"{name} {values[-1]:.0f} %", (classes_seen[-1], place), xytext=(14, 0), textcoords="offset points",
            va="center", color=colour, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    axes.set_title("accuracy on all digits so far (%)", loc="left")
    axes.set(xlabel="digits learned so far", xticks=classes_seen, ylim=(0, 104), yticks=range(0, 101, 25))
    axes.grid(alpha=0.25, axis="y")


def _draw_demo_bytes(axes: Any, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """A bar per method, the largest on top."""
    stored_kb = {name: run["storage_bytes"]["total"] / 1e3 for name, run in runs.items()}
    names = sorted(stored_kb, key=lambda name: stored_kb[name])
    axes.barh(names, [stored_kb[name] for name in names], color=[DEMO_COLOURS[name] for name in names], height=0.6)
    for row, name in enumerate(names):
        axes.annotate(
            f"{stored_kb[name]:.0f} kB", (stored_kb[name], row), xytext=(8, 0), textcoords="offset points",
            va="center", color=DEMO_COLOURS[name], fontweight="bold",
        )  # fmt: skip
    for label, name in zip(axes.get_yticklabels(), names):
        label.set_color(DEMO_COLOURS[name])
    axes.set_title("bytes kept between tasks", loc="left")
    axes.set(xticks=[], xlim=(0, 1.3 * max(*stored_kb.values(), 1)))
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)
