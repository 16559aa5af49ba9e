"""Draw results; needs matplotlib (extra `plot`).

rate.json            -> draw_rate -> R2 and replay accuracy against log bytes
runs of `krnet demo` -> draw_demo -> accuracy after each task, and against the bytes kept
run.json             -> draw_run  -> accuracy after each task
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
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
LABEL_GAP = 0.044  # between two names, as a share of the axis
NAME_ROOM = 0.4  # left of the points, as a share of their width
MAX_TICKS = 15  # more would overlap


def series_of(result: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Group the points by recorder and given settings; the smallest file comes first."""
    series: dict[str, list[dict[str, Any]]] = {}
    for point in result["points"]:
        series.setdefault(series_name(point["recorder"], point["given"]), []).append(point)
    return {name: sorted(points, key=lambda point: point["bytes"]) for name, points in series.items()}


def nines(share: float) -> float:
    """-log10(1 - share): 0.9 -> 1, 0.99 -> 2. A linear axis would draw all good recorders at nearly one height."""
    return -math.log10(max(1 - share, MIN_ERROR))


def best_of_each_recorder(points: Sequence[Mapping[str, Any]], measure: str) -> dict[str, list[Mapping[str, Any]]]:
    """Group the points by recorder; of its settings, keep those that are the best by the measure at each budget."""
    best: dict[tuple[str, int], Mapping[str, Any]] = {}
    for point in points:
        key = point["recorder"], point["budget"]
        best[key] = max(best.get(key, point), point, key=lambda point: point[measure])
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for point in sorted(best.values(), key=lambda point: point["bytes"]):
        lines.setdefault(point["recorder"], []).append(point)
    return lines


def draw_rate(path: Path, result: Mapping[str, Any], title: str | None = None, best_settings: bool = False) -> None:
    """Draw R2 against log bytes and, if there was a head, replay accuracy against log bytes.

    A line is a recorder with given settings or, with best_settings, a recorder with its best settings at each budget.
    """
    figure = rate_figure(result, title, best_settings)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def rate_figure(result: Mapping[str, Any], title: str | None = None, best_settings: bool = False) -> Any:
    Figure = require("matplotlib.figure", "plot").Figure

    panels = [("r2", "R² of replayed features", 1.0)]
    panels += [("replay_accuracy", "replay accuracy (%)", 100.0)] if result["head"] else []
    figure = Figure(figsize=(5.6 * len(panels), 5), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)  # inches
    title = title or f"{result['num_samples']:,} features of {'×'.join(map(str, result['shape'])) or 1}"
    figure.suptitle(title, fontsize=15, fontweight="bold")
    recorders = list(dict.fromkeys(point["recorder"] for point in result["points"]))
    for axes, (measure, label, scale) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        lines: Mapping[str, Sequence[Mapping[str, Any]]] = series_of(result)
        if best_settings:
            lines = best_of_each_recorder(result["points"], measure)
        line_starts = []
        for name, points in lines.items():
            place = recorders.index(points[0]["recorder"])
            colour, style = COLOURS[place % len(COLOURS)], "--" if points[0]["given"] and not best_settings else "-"
            x, y = [p["bytes"] / 1e6 for p in points], [nines(p[measure]) for p in points]
            axes.plot(x, y, style, marker="o", markersize=5, color=colour, linewidth=2.8 if place == 0 else 1.8)
            line_starts.append((y[0], x[0], name, colour))
        real = [result["real_accuracy"]] if measure == "replay_accuracy" else []
        axes.set_yticks([nines(share) for share in TICK_SHARES], [f"{scale * share:g}" for share in TICK_SHARES])
        set_rate_scales(axes, [nines(share) for share in (0.5, 0.9, *real, *(p[measure] for p in result["points"]))])
        axes.set_xlabel("file size (MB)", fontsize=12)
        axes.set_ylabel(label, fontsize=12)
        for share in real:
            axes.axhline(nines(share), linestyle="--", color="0.4", linewidth=1.2)
            axes.annotate(
                "real features", (0.01, nines(share)), xycoords=("axes fraction", "data"), xytext=(0, 3),
                textcoords="offset points", color="0.4", fontsize=11,
            )  # fmt: skip
        write_names(axes, line_starts)
    return figure


def set_rate_scales(axes: Any, heights: Sequence[float]) -> None:
    """Set limits that hold the heights, with room for names at the left; matplotlib's would hold all ticks."""
    ticker = require("matplotlib.ticker", "plot")

    axes.set_xscale("log")
    axes.margins(x=0.05)
    left, right = axes.get_xlim()
    # In decades. Names take a third of the axis; a lone budget gets room for its marker, too.
    span = max(math.log10(right / left), 0.5)
    axes.set_xlim(left / 10 ** (NAME_ROOM * span), right)
    axes.set_ylim(min(heights) - 0.1, max(heights) + 0.18)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def write_names(axes: Any, line_starts: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the names of lines left of their first points, given as (y, x, name, colour), where lines are far apart."""
    low, high = axes.get_ylim()
    # Lines that start at about the same bytes form a column, in which names must not overlap.
    columns: dict[int, list[tuple[float, float, str, str]]] = {}
    for start in sorted(line_starts, reverse=True):
        columns.setdefault(round(2 * math.log2(start[1])), []).append(start)
    for column in columns.values():
        gap = LABEL_GAP * (high - low)
        heights = spaced([y for y, *_ in column], gap, low + gap)
        for height, (_, x, name, colour) in zip(heights, column):
            axes.annotate(
                name, (x, height), xytext=(-8, 0), textcoords="offset points", color=colour, fontsize=11.5, ha="right",
                va="center", annotation_clip=False,
            )  # fmt: skip


def spaced(values: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Move values, the highest first, down until they are a gap apart, then up until none is below the bottom."""
    places: list[float] = []
    for value in values:
        places.append(min([value, *(place - gap for place in places[-1:])]))
    for number, place in enumerate(reversed(range(len(places)))):
        places[place] = max(places[place], bottom + number * gap)
    return places


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
