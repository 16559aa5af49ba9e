"""How far krnet is ahead of the best other recorder in as many bytes, on many sets of features.

rows of work `record` with a size in bits a value, of the lines "krnet, SET" and "RIVAL, SET" -> lead
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.rivals import OURS
from krnet.report.views.base import figure, number, point, read_points, register

TEXT = "R² of krnet minus that of the best other recorder whose file keeps to the same size; below 0 krnet is behind."


@register("lead", "krnet ahead of the best rival")
def lead(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """A line for each set."""
    best: dict[tuple[str, float], float] = {}

    def read_rival(entry: Entry) -> list[Point]:
        recorder, _, own = entry.line.partition(", ")
        key, r2 = (own, _size(entry)), number(entry.row["metrics"]["r2"], high=1)
        if recorder != OURS and entry.row["metrics"]["over_budget"] is False:
            best[key] = max(r2, best.get(key, r2))
        return []

    def read(entry: Entry) -> list[Point]:
        own, size = entry.line.partition(", ")[2], _size(entry)
        ahead = number(entry.row["metrics"]["r2"], high=1) - best[own, size]
        return [point(entry, size, ahead, series=own)]

    read_points(entries, read_rival)
    points, num_unusable = read_points([e for e in entries if e.line.partition(", ")[0] == OURS], read)
    x, y = Axis(label="size", unit="bits a value", scale="log"), Axis(label="R² ahead of the best rival")
    return figure(name, title, TEXT, "line", x, y, points, num_unusable)


def _size(entry: Entry) -> float:
    return number(entry.row["settings"]["bits_per_value"], 1e-6)
