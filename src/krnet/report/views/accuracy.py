"""Accuracy of class-incremental runs: after each task, after the last one, and what was forgotten.

rows of `krnet learn` (metrics: tasks, accuracy, last, forgetting) -> curves, last, forgetting
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from krnet.report import spread
from krnet.report.figure import PAPER, Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import (
    READ_ERRORS,
    figure,
    number,
    paper_percent,
    paper_points,
    percent,
    point,
    read_points,
    register,
)

ACCURACY = Axis(label="accuracy on all classes so far", unit="%")
CURVES_TEXT = "Test accuracy on all classes learned so far, after each task."
LAST_TEXT = "Test accuracy on all classes after the last task."
FORGETTING_TEXT = (
    "Mean over the tasks before the last: the best accuracy on its classes so far, minus that after the last task."
)


def classes_seen(entry: Entry) -> list[int]:
    """After each task: the number of classes learned so far."""
    return list(accumulate(int(number(size, 1)) for size in entry.row["metrics"]["tasks"]))


@register("curves", "Accuracy after each task")
def curves(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """x is the number of classes seen, or the task's number where the paper's numbers are given by that."""
    by_task = _paper_counts_tasks(entries, paper)

    def read(entry: Entry) -> Iterator[Point]:
        accuracy, seen = entry.row["metrics"]["accuracy"], classes_seen(entry)
        for task, share in enumerate(accuracy):
            if share is not None:  # method joint with only_last skips tasks
                yield point(entry, task if by_task else seen[task], percent(share))

    points, num_unusable = read_points(entries, read)
    points += paper_points(paper, lambda found: float(found.x), paper_percent)
    x = Axis(label="task" if by_task else "classes seen")
    return figure(name, title, CURVES_TEXT, "line", x, ACCURACY, points, num_unusable)


def _paper_counts_tasks(entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> bool:
    """Whether x of the paper's numbers are tasks: none is a number of classes that any run has seen."""
    given = {point.x for point in paper_points(paper, lambda found: float(found.x), paper_percent)}
    seen: set[float | str] = set()
    for entry in entries:
        try:
            seen |= set(classes_seen(entry))
        except READ_ERRORS:
            continue
    return bool(given) and not given & seen


@register("last", "Accuracy after the last task")
def last(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Of the paper's numbers, those without x, or else the one with the largest x of each series."""
    points, num_unusable = read_points(
        entries, lambda entry: [point(entry, entry.series, percent(entry.row["metrics"]["last"]))]
    )
    text = " ".join([LAST_TEXT, *spread.statements(points, "%")])
    points += paper_points(_last_numbers(paper), lambda found: found.series, paper_percent)
    y = Axis(label="last accuracy", unit="%")
    return figure(name, title, text, "bars", Axis(label="method", scale="names"), y, points, num_unusable)


def _last_numbers(paper: Sequence[PaperNumber]) -> list[PaperNumber]:
    chosen: dict[str, tuple[float, PaperNumber]] = {}
    for found in paper:
        try:
            place = float(found.x) if found.x else float("inf")
            paper_percent(found)
        except READ_ERRORS:
            continue
        if found.series not in chosen or place > chosen[found.series][0]:
            chosen[found.series] = place, found
    return [found for _, found in chosen.values()]


@register("forgetting", "Forgetting")
def forgetting(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper states no forgetting; it is left out."""
    points, num_unusable = read_points(
        entries,
        lambda entry: [point(entry, entry.series, round(100 * number(entry.row["metrics"]["forgetting"], -1, 1), 6))],
    )
    x, y = Axis(label="method", scale="names"), Axis(label="forgetting", unit="points")
    assert not any(found.source == PAPER for found in points)
    return figure(name, title, FORGETTING_TEXT, "bars", x, y, points, num_unusable)
