"""How fast: training steps, replay, whole runs.

rows of `speed` (metrics: steps, replay) -> speed (replay), steps
any row with seconds                     -> time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from krnet.report.figure import Axis, Entry, Figure, PaperNumber, Point
from krnet.report.views.base import figure, number, paper_points, point, read_points, register, short

REPLAY_TEXT = "Samples replayed in a second, by the number asked for at once; beside it reading the features from disk."
STEPS_TEXT = (
    "Milliseconds of one training step, and the least that its FLOPs and bytes need at the device's peak rates."
)
TIME_TEXT = "Seconds that runs took. They depend on the device, which the table of numbers names."
REPLAY_WAYS = {"exact": "exact", "fast": "fast", "plain": "plain network", "raw_from_disk": "features from disk"}
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _measured(entry: Entry, x: float | str, y: float, series: str) -> Point:
    """A point of a series, named with the device it was measured on."""
    return point(entry, x, y, series=series, note=short(entry.row.get("device")))


def _prefix(entries: Sequence[Entry]) -> dict[str, str]:
    """Entry series -> what stands before the ways and steps of its row: nothing if there is one series."""
    names = {entry.series for entry in entries}
    return {name: f"{name}: " if len(names) > 1 else "" for name in names}


@register("speed", "Replay speed")
def speed(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper states no speed of replay."""
    head = _prefix(entries)

    def read(entry: Entry) -> Iterator[Point]:
        for batch, ways in entry.row["metrics"]["replay"].items():
            for way, per_second in ways.items():
                series = head[entry.series] + REPLAY_WAYS.get(way, short(way))
                yield _measured(entry, number(float(batch), 1), number(per_second, 1e-9), series)

    points, num_unusable = read_points(entries, read)
    x, y = Axis(label="samples at once", scale="log"), Axis(label="samples per second", scale="log")
    return figure(name, title, REPLAY_TEXT, "line", x, y, points, num_unusable)


@register("steps", "Training step")
def steps(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """The paper states no time of a step."""
    head = _prefix(entries)

    def read(entry: Entry) -> Iterator[Point]:
        floors = []
        for step, found in entry.row["metrics"]["steps"].items():
            series = head[entry.series] + short(step)
            yield _measured(entry, series, number(found["milliseconds"], 0), series)
            floors.append(number(found["floor_milliseconds"], 0))
        lowest = head[entry.series] + "floor"
        yield _measured(entry, lowest, min(floors), lowest)

    points, num_unusable = read_points(entries, read)
    x, y = Axis(label="optimiser", scale="names"), Axis(label="a step", unit="ms")
    return figure(name, title, STEPS_TEXT, "bars", x, y, points, num_unusable)


@register("seconds", "Time")
@register("time", "Time")
def time(name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber]) -> Figure | None:
    """Of a row that states the seconds of its fit, those; else of the whole run."""

    def read(entry: Entry) -> list[Point]:
        metrics = entry.row["metrics"]
        fit = metrics.get("fit_seconds")
        seconds = number(fit if fit is not None else entry.row["seconds"], 0)
        return [_measured(entry, entry.series, round(seconds, 3), short(entry.series))]

    points, num_unusable = read_points(entries, read)
    points += paper_points(paper, lambda found: found.series, lambda found: number(found.value) * SECONDS[found.unit])
    x, y = Axis(label="run", scale="names"), Axis(label="time", unit="s")
    return figure(name, title, TIME_TEXT, "bars", x, y, points, num_unusable)
