"""krnet beside the best rival on many feature sets: bytes at equal R2, and R2 at equal bytes.

    entries of the lines "krnet, SET" and "RIVAL, SET" -> rivals -> a Markdown table for each list of sizes

Of a recorder's points on a set, log(bytes) is interpolated over log(1 - R2), in which such curves are nearly straight.
Nothing is extrapolated. Where no rival reaches krnet's R2 within the measured sizes, the share is that of krnet's bytes
for the R2 of the best rival.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from krnet.report.figure import Entry
from krnet.report.tables import markdown, rounded

OURS = "krnet"
LEAST_ERROR = 1e-9
Points = list[tuple[float, float, float]]
"""(size that was asked for, bytes, R2), from the smallest size on."""


def rivals(entries: Sequence[Entry]) -> str:
    """A line for each set, a column for each size: krnet's R2; its lead in R2; its share of the best rival's bytes."""
    curves = curves_of(entries)
    by_sizes: dict[tuple[float, ...], list[list[str]]] = {}
    for name, recorders in curves.items():
        ours = recorders.get(OURS, [])
        others = {recorder: points for recorder, points in recorders.items() if recorder != OURS}
        if ours and others:
            cells = [cell(ours, others, index) for index in range(len(ours))]
            by_sizes.setdefault(tuple(size for size, _, _ in ours), []).append([name, *cells])
    tables = [
        markdown(["set", *(f"{size:g} bits a value" for size in sizes)], lines) for sizes, lines in by_sizes.items()
    ]
    return "\n\n".join(tables)


def curves_of(entries: Sequence[Entry]) -> dict[str, dict[str, Points]]:
    """Set -> recorder -> its points, means over the seeds. A file above its budget is no point of that size."""
    found: dict[str, dict[str, dict[float, list[Mapping[str, float]]]]] = {}
    for entry in entries:
        size, metrics = entry.row["settings"].get("bits_per_value"), entry.row["metrics"]
        recorder, name = entry.line.partition(", ")[0], set_name(entry)
        if size is not None and not metrics["over_budget"]:
            found.setdefault(name, {}).setdefault(recorder, {}).setdefault(size, []).append(metrics)
    mean = statistics.mean
    return {
        name: {
            recorder: [
                (size, mean(run["bytes"] for run in runs), mean(run["r2"] for run in runs))
                for size, runs in sorted(sizes.items())
            ]
            for recorder, sizes in recorders.items()
        }
        for name, recorders in found.items()
    }


def set_name(entry: Entry) -> str:
    """The set of features: what the entry's line names behind the recorder."""
    return re.sub("^zoo-(full|small)-", "", entry.line.partition(", ")[2])


def side_by_side(entries: Sequence[Entry]) -> str:
    """A line for each set and size, a column for each recorder or variant: its R2."""
    curves = curves_of(entries)
    columns = list(dict.fromkeys(entry.line.partition(", ")[0] for entry in entries))
    lines = []
    for name, own in curves.items():
        for size in sorted({size for points in own.values() for size, _, _ in points}):
            found = {column: r2 for column, points in own.items() for at, _, r2 in points if at == size}
            cells = [rounded(round(found[column], 6), 4) if column in found else "" for column in columns]
            lines.append([name, f"{size:g}", *cells])
    return markdown(["set", "bits a value", *columns], lines)


def cell(ours: Points, others: Mapping[str, Points], index: int) -> str:
    size, _, r2 = ours[index]
    beside = [own_r2 for points in others.values() for own_size, _, own_r2 in points if own_size == size]
    lead = f", {rounded(round(r2 - max(beside), 6), 3)} ahead" if beside else ""
    share = share_of_best(ours, others, index)
    return rounded(round(r2, 6), 3) + lead + (f", {share}" if share else "")


def share_of_best(ours: Points, others: Mapping[str, Points], index: int) -> str:
    """ "0.71 of pca": krnet's share of the bytes of the rival that needs the fewest; empty if no curves overlap."""
    size, num_bytes, r2 = ours[index]
    needed = [(found, name) for name, points in others.items() if (found := bytes_for(points, r2)) is not None]
    if needed:
        least, name = min(needed)
        return f"{rounded(round(num_bytes / least, 6), 2)} of {name}"
    beside = [(own_r2, own, name) for name, points in others.items() for s, own, own_r2 in points if s == size]
    if beside:
        best_r2, own_bytes, name = max(beside)
        if (found := bytes_for(ours, best_r2)) is not None:
            return f"{rounded(round(found / own_bytes, 6), 2)} of {name}"
    return ""


def bytes_for(points: Points, r2: float) -> float | None:
    """Bytes at which a recorder's curve reaches this R2; None if it is outside of its points."""
    error = math.log(max(1 - r2, LEAST_ERROR))
    curve = sorted((math.log(max(1 - own_r2, LEAST_ERROR)), math.log(num_bytes)) for _, num_bytes, own_r2 in points)
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= error <= x1:
            share = (error - x0) / (x1 - x0) if x1 > x0 else 0.0
            return math.exp(y0 + (y1 - y0) * share)
    return None
