"""Size of a recording against how well it replays.

rows of recipe `rate`, and others whose metrics hold bytes and r2 -> rate, replay-accuracy, error
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.config import format_size
from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import (
    figure,
    number,
    paper_percent,
    paper_points,
    percent,
    point,
    read_points,
    register,
)

RATE_TEXT = "Size of the file, measured on disk, and R² of the features that it replays (1: exact)."
ACCURACY_TEXT = "Size of the file and the accuracy of a head on the features that it replays."
ERROR_TEXT = "Mean squared error of the replayed features; those of the rectified layer, which are not normalised."
NINES_TEXT = " Higher up the axis is stretched: each step to 90, 99, 99.9 % is as wide as the last."
FILE_SIZE = Axis(label="file size", unit="MB", scale="log")


@register("rate", "File size against R²")
def rate(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Series: recorders; a negative R2 (worse than the mean) is not drawn."""
    points, num_unusable = read_points(entries, lambda entry: [_read(entry, number(entry.row["metrics"]["r2"], 0, 1))])
    points += paper_points(
        paper, lambda found: number(float(found.x), 1e-6), lambda found: _share(found.unit, found.value)
    )
    y = Axis(label="R² of replayed features", scale="nines")
    return figure(name, title, RATE_TEXT + NINES_TEXT, "line", FILE_SIZE, y, points, num_unusable)


@register("replay-accuracy", "File size against replay accuracy")
def replay_accuracy(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Says in its text what the head reaches on real features, where the rows agree on that."""
    points, num_unusable = read_points(
        entries, lambda entry: [_read(entry, percent(entry.row["metrics"]["replay_accuracy"]))]
    )
    points += paper_points(paper, lambda found: number(float(found.x), 1e-6), paper_percent)
    text = ACCURACY_TEXT + NINES_TEXT
    real, _ = read_points(entries, lambda entry: [point(entry, "", percent(entry.row["metrics"]["real_accuracy"]))])
    heights = {round(found.y, 2) for found in real}
    if heights:
        low, high = f"{min(heights):g}", f"{max(heights):g}"
        text += f" On real features it is {low} %." if low == high else f" On real features it is {low} to {high} %."
    y = Axis(label="replay accuracy", unit="%", scale="nines")
    return figure(name, title, text, "line", FILE_SIZE, y, points, num_unusable)


@register("error", "Error of the reconstruction")
def error(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Of the paper's numbers, those in MSE."""
    points, num_unusable = read_points(
        entries, lambda entry: [point(entry, entry.series, 1e4 * number(entry.row["metrics"]["mse"], 0))]
    )
    points += paper_points(paper, lambda found: found.series, _ten_thousandths)
    y = Axis(label="mean squared error", unit="× 10⁻⁴")
    return figure(name, title, ERROR_TEXT, "bars", Axis(label="recorder", scale="names"), y, points, num_unusable)


def _ten_thousandths(found: PaperNumber) -> float:
    if found.unit != "MSE":
        raise ValueError(f"{found.unit} is no error")
    return 1e4 * number(found.value, 0)


def _read(entry: Entry, y: float) -> Point:
    budget = (entry.row.get("settings") or {}).get("budget")
    label = f"budget {format_size(int(number(budget, 1)))}" if budget is not None else ""
    return point(entry.sized, number(entry.row["metrics"]["bytes"], 1) / 1e6, y, label=label)


def _share(unit: str, value: float) -> float:
    if unit not in ("", "R2", "R²"):
        raise ValueError(f"{unit} is not R2")
    return number(value, 0, 1)
