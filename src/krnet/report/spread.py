"""Means over seeds, and what may be said of their differences.

points of single runs -> Summary of each series (mean, deviation, number of seeds) -> sentences
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from krnet.report.figure import OURS, Point


@dataclass(frozen=True)
class Summary:
    series: str
    mean: float
    deviation: float | None
    """Standard deviation (n - 1) over the runs; None for one run."""

    def overlaps(self, other: Summary) -> bool:
        """Whether the means are no further apart than both deviations together; nobody knows where one seed is all."""
        if self.deviation is None or other.deviation is None:
            return True
        return abs(self.mean - other.mean) <= self.deviation + other.deviation


def summarize(series: str, values: Sequence[float]) -> Summary:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Summary(series, statistics.mean(values), deviation)


def by_series(points: Iterable[Point]) -> list[Summary]:
    """Of our points, whatever their x."""
    values: dict[str, list[float]] = {}
    for point in points:
        if point.source == OURS:
            values.setdefault(point.series, []).append(point.y)
    return [summarize(series, found) for series, found in values.items()]


def statements(points: Iterable[Point], unit: str) -> list[str]:
    """What may be said of the highest mean: which means differ from it by more than the seeds scatter."""
    found = sorted(by_series(points), key=lambda summary: summary.mean, reverse=True)
    if len(found) < 2:
        return []
    top, others = found[0], found[1:]
    if top.deviation is None:
        return [f"The highest is {top.series}, with one seed: how far seeds scatter is not known."]
    apart = [summary for summary in others if not summary.overlaps(top)]
    head = f"The highest mean is {top.series}'s, {top.mean:.1f} ± {top.deviation:.1f} {unit}."
    if len(apart) == len(others):
        return [head, "Every other mean is lower by more than both deviations together."]
    within = [s.series for s in others if s.deviation is not None and s.overlaps(top)]
    alone = [s.series for s in others if s.deviation is None]
    parts = [("Within the spread of seeds of it", within), ("One seed, so not compared", alone)]
    return [head, *(f"{what}: {_listed(names)}." for what, names in parts if names)]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
