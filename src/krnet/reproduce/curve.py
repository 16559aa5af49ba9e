"""Keep the R2 of a fit over its time, in a file beside the recording.

with following(path, watch) as follow: record(..., watch=follow)    path: [[iteration, seconds, R2], ...]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from krnet.io.atomic import read_json, write_json
from krnet.progress import Progress, Watch

STEP = 1.05  # from one point to the next the iterations grow by this: 150 points up to 50,000
Points = list[tuple[int, float, float]]


@contextmanager
def following(path: Path, watch: Watch | None) -> Iterator[Watch]:
    """Collect points, and write them at the end; a fit that goes on from a checkpoint adds to those before."""
    points = read_curve(path)

    def follow(progress: Progress) -> None:
        if progress.unit == "iterations" and math.isfinite(r2 := progress.values.get("R2", math.nan)):
            while points and points[-1][0] >= progress.done:  # made again, from an older checkpoint or from the start
                points.pop()
            if not points or progress.done >= STEP * points[-1][0] or progress.share == 1:
                points.append((progress.done, round(progress.seconds, 2), round(r2, 5)))
        if watch is not None:
            watch(progress)

    try:
        yield follow
    finally:
        if points:
            write_json(path, {"curve": points})


def read_curve(path: Path) -> Points:
    """The points so far; none if there was no fit, or its file was cut short."""
    try:
        return [(int(done), float(seconds), float(r2)) for done, seconds, r2 in read_json(path)["curve"]]
    except (FileNotFoundError, ValueError, KeyError):
        return []
