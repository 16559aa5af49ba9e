"""The storage table: bytes of features, of an autoencoder's codes and of KRNet's, for a number of classes.

rows of work `plan` (metrics: quantity, values by number of classes) -> table

The paper's MB and GB are 2^20 and 2^30 bytes; the figure counts like the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, number, paper_points, point, read_points, register

TEXT = "What a number of classes takes, in the paper's MB of 2^20 bytes. Computed from the shapes of all tensors."
MEBIBYTES = {"MB": 1.0, "GB": 1024.0}


@register("storage", "Storage by number of classes")
@register("table", "Storage by number of classes")
def table(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Quantities that are no bytes, such as ratios, have no place on its axis: their rows are left out."""

    def read(entry: Entry) -> Iterator[Point]:
        metrics = entry.row["metrics"]
        if not str(metrics["quantity"]).endswith("_bytes"):
            raise ValueError("no bytes")
        for num_classes, size in metrics["values"].items():
            yield point(entry, number(float(num_classes), 1), number(size, 1) / 2**20)

    points, num_unusable = read_points(entries, read)
    smallest = min((found.x for found in points if not isinstance(found.x, str)), default=None)

    def place(found: PaperNumber) -> float:
        if not found.x and smallest is not None:
            return smallest  # a size that is the same for every number of classes
        return float(found.x)

    points += paper_points(paper, place, lambda found: number(found.value) * MEBIBYTES[found.unit])
    y = Axis(label="stored", unit="MB", scale="log")
    return figure(name, title, TEXT, "line", Axis(label="classes"), y, points, num_unusable)
