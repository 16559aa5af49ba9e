"""The contract of a view: entries and the paper's numbers to a figure, or to None where there is nothing to show.

    draw("curves", figure name, title, entries, paper) -> Figure | None

A view is registered by name, as recipes list it. Rows come from ledgers of any age, or of anyone: a row that a view
cannot use is left out, and the figure's text counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from krnet.config import unknown_setting
from krnet.report.figure import PAPER, Axis, Entry, Figure, PaperNumber, Point

Draw = Callable[[str, str, Sequence[Entry], Sequence[PaperNumber]], Figure | None]
READ_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, OSError)
"""What reading a number out of a row of an unknown form raises."""
LONGEST_TEXT = 600  # of a command or a name: no row fills the page by itself


@dataclass(frozen=True)
class _View:
    heading: str
    draw: Draw


_REGISTRY: dict[str, _View] = {}


def register(name: str, heading: str) -> Callable[[Draw], Draw]:
    """heading: what the figure is called where its data set and methods are known, as below a recipe's title."""

    def keep(draw: Draw) -> Draw:
        assert name not in _REGISTRY, f"two views are called {name}"
        _REGISTRY[name] = _View(heading, draw)
        return draw

    return keep


def view_names() -> list[str]:
    return list(_REGISTRY)


def heading(name: str) -> str:
    return _find(name).heading


def draw(
    view: str, name: str, title: str, entries: Sequence[Entry], paper: Sequence[PaperNumber] = ()
) -> Figure | None:
    """Draw by the view of that name. None: no entry holds what it shows, and neither does the paper."""
    return _find(view).draw(name, title, entries, paper)


def _find(name: str) -> _View:
    if name not in _REGISTRY:
        raise unknown_setting(name, _REGISTRY, "figure")
    return _REGISTRY[name]


# ------------------------------------------------------------------ rows to points


def read_points(entries: Sequence[Entry], read: Callable[[Entry], Iterable[Point]]) -> tuple[tuple[Point, ...], int]:
    """The points of all entries, and the number of entries that could not be read or have none."""
    points: list[Point] = []
    num_unusable = 0
    for entry in entries:
        try:
            found = list(read(entry))
        except READ_ERRORS:
            found = []
        points += found
        num_unusable += not found
    return tuple(points), num_unusable


def point(entry: Entry, x: float | str, y: float, **more: Any) -> Point:
    """A point with the row's provenance; `more` replaces fields of it."""
    row, metrics, settings = entry.row, entry.row["metrics"], entry.row.get("settings") or {}
    found = Point(
        series=short(entry.series), x=x, y=y, seed=seed_of(row.get("seed")),
        data=short(metrics.get("data") or settings.get("data")),
        method=short(metrics.get("method") or settings.get("method") or settings.get("recorder")),
        commit=short(row.get("commit")), date=short(row.get("date")), command=short(row.get("command")),
    )  # fmt: skip
    return replace(found, **more) if more else found


def short(value: Any) -> str:
    """Text of a row, at a length that a page can show; anything else is no text."""
    text = value if isinstance(value, str) else ""
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def seed_of(value: Any) -> int | None:
    """A row's seed, where it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number from low to high; a ValueError for anything else that a row may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    if not low <= value <= high:
        raise ValueError(f"{value} is outside {low} to {high}")
    return float(value)


def percent(share: Any) -> float:
    """A share as a ledger row holds it, in percent. Rounded, so that 0.7083 is 70.83 and not 70.83000000000001."""
    return round(100 * number(share, 0, 1), 6)


# ------------------------------------------------------------------ the paper


def paper_points(
    paper: Sequence[PaperNumber], x: Callable[[PaperNumber], float | str], y: Callable[[PaperNumber], float]
) -> tuple[Point, ...]:
    """Points of the paper's numbers; x and y raise a ValueError for a number that the figure does not show."""
    points = []
    for found in paper:
        try:
            own = Point(series=found.series, x=x(found), y=y(found), source=PAPER, note=_place(found))
        except READ_ERRORS:
            continue
        points.append(own)
    return tuple(points)


def paper_percent(found: PaperNumber) -> float:
    if found.unit not in ("%", ""):
        raise ValueError(f"{found.value} {found.unit} is no share")
    return number(found.value if found.unit == "%" else 100 * found.value, 0, 100)


def _place(found: PaperNumber) -> str:
    error = found.reading_error
    return found.place if error is None else f"{found.place}, read off the figure to ± {error:g} {found.unit}".rstrip()


# ------------------------------------------------------------------ the figure


def figure(
    name: str, title: str, text: str, kind: str, x: Axis, y: Axis, points: Sequence[Point], num_unusable: int = 0
) -> Figure | None:
    """The figure, or None without points; says in its text how many rows it leaves out."""
    if not points:
        return None
    if num_unusable:
        rows, lack = ("row", "lacks") if num_unusable == 1 else ("rows", "lack")
        text += f" Not drawn: {num_unusable} {rows} that {lack} a number this figure needs."
    return Figure(name=name, title=title, text=text, kind=kind, x=x, y=y, points=tuple(points))
