"""What each part of a recorder adds, on several sets of features.

rows of work `record` of the lines "PART, SET" -> parts
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.rivals import set_name
from krnet.report.views.base import figure, number, point, read_points, register

TEXT = "Share of the features' variance that the replays lose, 1 − R², in as many bytes."


@register("parts", "What each part adds")
def parts(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """A bar for each set and part, those of a set side by side."""
    order = list(dict.fromkeys(set_name(entry) for entry in entries))

    def read(entry: Entry) -> list[Point]:
        lost = 100 * (1 - number(entry.row["metrics"]["r2"], high=1))
        part = entry.line.partition(", ")[0]
        return [point(entry, f"{set_name(entry)}: {part}", lost, series=part)]

    by_set = sorted(entries, key=lambda entry: order.index(set_name(entry)))
    points, num_unusable = read_points(by_set, read)
    x, y = Axis(label="features", scale="names"), Axis(label="variance lost", unit="%")
    return figure(name, title, TEXT, "bars", x, y, points, num_unusable)
