"""A figure as data: what the page, the pictures and the tables of the docs are all drawn from.

    entries (a series name and a row of the ledger each), numbers of the paper
        -> krnet.report.views -> Figure -> page.py (HTML), pictures.py (PNG, SVG), tables of docs/results.md

Points are single runs: whoever draws them takes the mean and standard deviation over the seeds of a series.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

OURS, PAPER = "ours", "paper"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run of one series."""

    series: str
    """Name in legends and tables: KRIL, LUCIR, "KRIL, 6.1 MB"."""
    row: Mapping[str, Any]
    """A row of the ledger."""
    line: str = ""
    """Figures with an axis of bytes join the runs of one line: "KRIL" for KRIL in 1.6, 3.1 and 6.1 MB."""

    @property
    def sized(self) -> Entry:
        """This run as a point of its line."""
        return replace(self, series=self.line or self.series)


@dataclass(frozen=True, kw_only=True)
class PaperNumber:
    """One line of results/paper.csv."""

    recipe: str
    series: str
    x: str
    """Task, number of classes or number of fixed layers, as the recipe's figure has it; empty for a single number."""
    value: float
    unit: str
    place: str
    """Where the paper says it: Table II, Section IV-B."""
    reading_error: float | None = None
    """For a value that was read off a curve: how far off it may be. None: printed as a number."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    label: str
    unit: str = ""
    """Stands behind values: %, MB."""
    scale: str = "linear"
    """linear, log, names (x is text) or nines (-log10(1 - y): 0.9 and 0.99 are as far apart as 0.99 and 0.999; with the
    unit %, 90 and 99 as 99 and 99.9)."""


@dataclass(frozen=True, kw_only=True)
class Point:
    series: str
    x: float | str
    y: float
    source: str = OURS
    """ours, or paper."""
    seed: int | None = None
    label: str = ""
    """What tells points of a series apart beside x: class of an embedding's point, whose matrix a cell is of, or the
    budget that x, the bytes used, was held to. Runs of other seeds have the same label."""
    data: str = ""
    method: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""
    note: str = ""
    """For the reader: place in the paper, or what sets this run apart."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    """File name of pictures and CSV, and anchor on the page: cifar100-10-curves."""
    title: str
    text: str
    """What is shown and how it was measured, in a sentence or two."""
    kind: str
    """line, dots, bars, embedding (label: class) or matrix (x: task, series: after which task, label: whose matrix)."""
    x: Axis
    y: Axis
    points: tuple[Point, ...]
