"""Ranges of samples: what is there, what is missing, and where to cut.

missing(0, 100, [(20, 40)])    -> (0, 20), (40, 100)
cut([(0, 20), (40, 100)], 50)  -> (0, 20), (40, 50), (50, 100)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

NUM_NAMED = 3  # ranges in a message
Range = tuple[int, int]
"""start, stop: the samples start .. stop - 1."""


def missing(start: int, stop: int, done: Iterable[Range]) -> list[Range]:
    """The parts of start .. stop that no range of `done` covers, in order."""
    found = []
    for first, end in sorted(done):
        if start < min(first, stop):
            found.append((start, min(first, stop)))
        start = max(start, end)
    return [*found, (start, stop)] if start < stop else found


def cut(ranges: Iterable[Range], step: int) -> Iterator[Range]:
    """The same ranges, cut at the multiples of `step`."""
    for start, stop in ranges:
        while start < stop:
            end = min(stop, (start // step + 1) * step)
            yield start, end
            start = end


def text(ranges: Iterable[Range]) -> str:
    """0..19, 40..99, and 2 more"""
    listed = list(ranges)
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in listed[:NUM_NAMED])
    return shown if len(listed) <= NUM_NAMED else f"{shown} and {len(listed) - NUM_NAMED} more"
