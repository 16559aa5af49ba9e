"""Draw results; needs matplotlib (extra `plot`).

rate.json            -> draw_rate -> R2 and replay accuracy against log bytes
runs of `krnet demo` -> draw_demo -> accuracy after each task, and the bytes kept
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
DEMO_COLOURS = {"fine-tuning": "0.45", "KRIL": "#c2410c", "all images": "#15803d"}
DEMO_FONT = {"font.size": 17, "axes.titlesize": 18, "axes.labelsize": 17}  # to be read at half size


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


def draw_demo(path: Path, runs: Mapping[str, Mapping[str, Any]], note: str | None = None) -> None:
    """Draw the accuracy after each task as lines, and the bytes kept between tasks as bars.

    note: stands in the title instead of what the bytes say
    """
    matplotlib, Figure = require("matplotlib", "plot"), require("matplotlib.figure", "plot").Figure

    with matplotlib.rc_context(DEMO_FONT):
        figure = Figure(figsize=(12, 5.4), dpi=130, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.08)
        kril_kb, images_kb = (runs[name]["storage_bytes"]["total"] / 1e3 for name in ("KRIL", "all images"))
        title = f"KRIL remembers old digits in {kril_kb:.0f} kB; keeping all images takes {images_kb:.0f} kB"
        figure.suptitle(note or title, fontsize=21, fontweight="bold")
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
