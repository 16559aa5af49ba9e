"""The accuracy matrix of runs: accuracy on the classes of each task, after each task.

rows of `krnet learn` (metrics: accuracy_matrix) -> matrix
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, percent, point, read_points, register, short

TEXT = (
    "Test accuracy on the classes of each task (columns) after each task (rows). A column that pales shows forgetting."
)


@register("matrix", "Accuracy on each task")
def matrix(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper shows no such matrix."""

    def read(entry: Entry) -> Iterator[Point]:
        for after, row in enumerate(entry.row["metrics"]["accuracy_matrix"]):
            for task, share in enumerate(row or ()):
                if share is not None:
                    whose = short(entry.series)
                    yield point(entry, task, percent(share), series=f"after task {after}", label=whose)

    points, num_unusable = read_points(entries, read)
    x, y = Axis(label="classes of task"), Axis(label="accuracy", unit="%")
    return figure(name, title, TEXT, "matrix", x, y, points, num_unusable)
