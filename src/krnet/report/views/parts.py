"""What each part of a recorder adds, on several sets of features.

rows of work `record` of the lines "PART, SET" -> parts
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.rivals import set_name
from krnet.report.views.base import figure, number, point, read_points, register

TEXT = "Share of the features' variance that the replays lose, 1 − R², at equal bytes."


@register("parts", "What each part adds")
def parts(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """A bar for each set and part."""

    def read(entry: Entry) -> list[Point]:
        lost = 100 * (1 - number(entry.row["metrics"]["r2"], high=1))
        bar = f"{set_name(entry)}: {entry.line.partition(', ')[0]}"
        return [point(entry, bar, lost, series=bar)]

    points, num_unusable = read_points(entries, read)
    x, y = Axis(label="features", scale="names"), Axis(label="variance lost", unit="%")
    return figure(name, title, TEXT, "bars", x, y, points, num_unusable)
