"""Bytes that a method keeps of old tasks, against its last accuracy.

rows of `krnet learn` (metrics: storage_bytes, last; settings: budget) -> bytes
"""

from __future__ import annotations

from collections.abc import Sequence

from krnet.config import format_size
from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, number, paper_percent, paper_points, percent, point, read_points, register

TEXT = "Bytes kept between tasks, as measured on disk, and the test accuracy after the last task; without the network."


@register("bytes", "Bytes kept against accuracy")
def kept_bytes(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """A series with several budgets becomes a line. x of the paper's numbers, where they have one: megabytes."""
    keeps_nothing = 0

    def read(entry: Entry) -> list[Point]:
        nonlocal keeps_nothing
        metrics, budget = entry.row["metrics"], (entry.row.get("settings") or {}).get("budget")
        total = number(metrics["storage_bytes"]["total"], 0)
        if total == 0:
            keeps_nothing += 1
            raise ValueError("a logarithmic axis has no 0")
        label = f"budget {format_size(int(number(budget, 1)))}" if budget is not None else ""
        return [point(entry.sized, total / 1e6, percent(metrics["last"]), label=label)]

    points, num_unusable = read_points(entries, read)
    points += paper_points(paper, lambda found: number(float(found.x), 1e-6), paper_percent)
    text = TEXT
    if keeps_nothing:
        text += f" {keeps_nothing} run{'s that keep' if keeps_nothing > 1 else ' that keeps'} nothing"
        text += " cannot be placed on this logarithmic axis."
    x, y = Axis(label="kept between tasks", unit="MB", scale="log"), Axis(label="last accuracy", unit="%")
    return figure(name, title, text, "line", x, y, points, num_unusable - keeps_nothing)
