"""Figures as PNG and SVG, for a paper; needs matplotlib (extra `plot`).

    Figure -> write_pictures -> DIR/NAME.png, DIR/NAME.svg: means over seeds, bands and whiskers one deviation

The same figures that the page shows, with the same colours and markers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from krnet.config import require
from krnet.io.atomic import AnyPath, atomic_write, make_folder
from krnet.report.figure import OURS, Axis, Figure, Point
from krnet.report.spread import Summary, summarize

COLOURS = ("#0b62a8", "#c24a00", "#00775a", "#8d3c8a", "#866100", "#b01342", "#2b7f96", "#555f6b")  # as in page.css
MARKERS = "o^sD*Pv"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
PAPER_DASH = (0, (3, 2.5))
LEGEND_ROWS = 14  # more series than that stand in several columns
MAX_COLUMNS = 3
MAX_PANELS = 6
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "krnet",
    "svg.fonttype": "none",
}
NINES = (0, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9999)


def write_pictures(figure: Figure, folder: AnyPath) -> list[Path]:
    """Write NAME.png and NAME.svg into the folder, which is made; returns their paths."""
    matplotlib = require("matplotlib", "plot")
    make_folder(folder)
    paths = [Path(folder) / f"{figure.name}.{kind}" for kind in ("png", "svg")]
    with matplotlib.rc_context(STYLE):
        drawn = draw_picture(figure)
        for path in paths:
            with atomic_write(path) as file:
                # Without a date, equal figures are equal files.
                metadata = {"Date": None} if path.suffix == ".svg" else {}
                drawn.savefig(file, format=path.suffix[1:], dpi=200, metadata=metadata)
    return paths


def draw_picture(figure: Figure) -> Any:
    """The figure as one of matplotlib."""
    make = require("matplotlib.figure", "plot").Figure
    drawer = {"bars": _draw_bars, "matrix": _draw_matrix, "embedding": _draw_embedding}.get(figure.kind, _draw_lines)
    picture = make(figsize=(6.4, 4.2), layout="constrained")
    drawer(picture, figure)
    picture.suptitle(_plain(figure.title), fontsize=10, x=0.02, ha="left")
    return picture


def _plain(text: str) -> str:
    """Text that matplotlib takes for no formula."""
    return text.replace("$", r"\$")


def _named(axis: Axis) -> str:
    return f"{axis.label} ({axis.unit})" if axis.unit else axis.label


def _grouped(points: Sequence[Point]) -> dict[tuple[str, str], list[tuple[float | str, Summary]]]:
    """(series, source) -> place and summary of the runs there, as numbers.js does."""
    groups: dict[tuple[str, str], dict[float | str, list[Point]]] = {}
    for point in points:
        places = groups.setdefault((point.series, point.source), {})
        places.setdefault(point.label or point.x, []).append(point)
    return {key: [_place(key[0], own) for own in places.values()] for key, places in groups.items()}


def _place(series: str, own: Sequence[Point]) -> tuple[float | str, Summary]:
    numbers = [point.x for point in own if not isinstance(point.x, str)]
    x = sum(numbers) / len(numbers) if len(numbers) == len(own) else own[0].x
    return x, summarize(series, [point.y for point in own])


# ------------------------------------------------------------------ kinds


def _draw_lines(picture: Any, figure: Figure) -> None:
    axes = picture.subplots()
    names = list(dict.fromkeys(point.series for point in figure.points))
    for (series, source), places in _grouped(figure.points).items():
        number, ours = names.index(series), source == OURS
        if all(not isinstance(x, str) for x, _ in places):
            places.sort(key=lambda item: item[0])
        xs = [x for x, _ in places]
        middle = [_height(figure.y, found.mean) for _, found in places]
        low = [_height(figure.y, found.mean - (found.deviation or 0)) for _, found in places]
        high = [_height(figure.y, found.mean + (found.deviation or 0)) for _, found in places]
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)] if ours else PAPER_DASH
        axes.plot(
            xs, middle, marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.4, color=colour,
            linestyle=dash if figure.kind == "line" else "none", label=_plain(series if ours else f"{series} (paper)"),
            markerfacecolor=colour if ours else "white",
        )  # fmt: skip
        if low != high and len(xs) > 1:
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        elif low != high:
            axes.vlines(xs, low, high, color=colour)
    _set_scales(axes, figure)
    axes.grid(alpha=0.25)
    handles, texts = axes.get_legend_handles_labels()
    columns = min(math.ceil(len(texts) / LEGEND_ROWS), MAX_COLUMNS)
    rows = math.ceil(len(texts) / columns)
    picture.legend(handles, texts, loc="outside right upper", fontsize=7, frameon=False, ncols=columns)
    picture.set_size_inches(6.4 + columns * (0.6 + 0.06 * max(map(len, texts))), max(4.2, 0.6 + 0.16 * rows))


def _height(axis: Axis, value: float) -> float:
    if axis.scale != "nines":
        return value
    return -math.log10(max(1 - (value / 100 if axis.unit == "%" else value), 1e-5))


def _set_scales(axes: Any, figure: Figure) -> None:
    axes.set(xlabel=_plain(_named(figure.x)), ylabel=_plain(_named(figure.y)))
    for axis, name in ((figure.x, "x"), (figure.y, "y")):
        values = [getattr(point, name) for point in figure.points]
        if axis.scale == "log" and all(not isinstance(value, str) and value > 0 for value in values):
            axes.set(**{f"{name}scale": "log"})
            getattr(axes, f"{name}axis").set_major_formatter(lambda value, _: f"{value:g}")
    if figure.y.scale == "nines":
        low, high = axes.get_ylim()
        ticks = [share for share in NINES if low <= -math.log10(1 - share) <= high]
        factor = 100 if figure.y.unit == "%" else 1
        axes.set_yticks([-math.log10(1 - share) for share in ticks], [f"{factor * share:g}" for share in ticks])


def _draw_bars(picture: Any, figure: Figure) -> None:
    axes = picture.subplots()
    groups = _grouped(figure.points)
    ours = {series: places[0][1] for (series, source), places in groups.items() if source == OURS}
    paper = {series: places[0][1] for (series, source), places in groups.items() if source != OURS}
    order = list(dict.fromkeys(point.series for point in figure.points))
    names = sorted(order, key=lambda name: (ours.get(name) or paper[name]).mean)
    for row, name in enumerate(names):
        if name in ours:
            found = ours[name]
            axes.barh(row, found.mean, height=0.7, color=COLOURS[order.index(name) % len(COLOURS)], alpha=0.8)
            digits = ".1f" if figure.y.unit in ("%", "points") else ".4g"
            spread = "" if found.deviation is None else f" ± {found.deviation:{digits}}"
            if found.deviation is not None:
                axes.errorbar(found.mean, row, xerr=found.deviation, color="black", capsize=2, linewidth=1)
            end = max(found.mean + (found.deviation or 0), 0)
            text = f"{found.mean:{digits}}{spread}"
            axes.annotate(text, (end, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7)
        if name in paper:
            axes.plot(
                paper[name].mean, row, marker="D", markersize=5, color="black", markerfacecolor="white", linestyle=""
            )
    axes.set_yticks(range(len(names)), [_plain(name) for name in names], fontsize=8)
    axes.set_xlabel(_plain(_named(figure.y)) + ("; diamonds: the paper" if paper else ""))
    axes.margins(x=0.15)
    picture.set_figheight(max(1.2 + 0.25 * len(names), 2.0))


def _draw_matrix(picture: Any, figure: Figure) -> None:
    labels = list(dict.fromkeys(point.label for point in figure.points))[:MAX_PANELS]
    panels = _panels(picture, len(labels))
    for axes, label in zip(panels, labels):
        own = [point for point in figure.points if point.label == label]
        rows = list(dict.fromkeys(point.series for point in own))
        columns = sorted({point.x for point in own if not isinstance(point.x, str)})
        values = [[math.nan] * len(columns) for _ in rows]
        for row, series in enumerate(rows):
            for column, x in enumerate(columns):
                cell = [point.y for point in own if (point.series, point.x) == (series, x)]
                if cell:
                    values[row][column] = sum(cell) / len(cell)
        shown = axes.imshow(values, vmin=0, vmax=100, cmap="Blues", aspect="auto")
        axes.set_xticks(range(len(columns)), [f"{x:g}" for x in columns], fontsize=6)
        axes.set_yticks(range(len(rows)), [_plain(row) for row in rows], fontsize=6)
        axes.set_title(_plain(label), fontsize=8)
        axes.set_xlabel(_plain(figure.x.label))
    picture.colorbar(shown, ax=panels, label=_plain(_named(figure.y)))


def _draw_embedding(picture: Any, figure: Figure) -> None:
    names = list(dict.fromkeys(point.series for point in figure.points))[:MAX_PANELS]
    classes = sorted({point.label for point in figure.points})
    for axes, name in zip(_panels(picture, len(names)), names):
        for number, label in enumerate(classes):
            own = [point for point in figure.points if (point.series, point.label) == (name, label)]
            axes.plot(
                [point.x for point in own], [point.y for point in own], linestyle="", markersize=2,
                marker=MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)],
            )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        axes.set_title(_plain(name), fontsize=8)


def _panels(picture: Any, count: int) -> list[Any]:
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    picture.set_size_inches(1.2 + 3.2 * columns, 0.6 + 2.8 * rows)
    grid = list(picture.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[count:]:
        axes.remove()
    return grid[:count]
