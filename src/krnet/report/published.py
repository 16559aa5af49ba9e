"""Read the numbers of the paper.

    results/paper.csv -> read_published -> list[PaperNumber]

Columns: recipe, series, x, value, unit, place, reading_error. A number that several recipes show has a row for each.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

from krnet.errors import InputError
from krnet.io.kept import find_kept
from krnet.report.figure import PaperNumber

PAPER_FILE = "results/paper.csv"
COLUMNS = ("recipe", "series", "x", "value", "unit", "place", "reading_error")


def read_published(path: Path | str | None = None) -> list[PaperNumber]:
    """All numbers of the paper, in the order of the file; without a path, of results/paper.csv."""
    file = find_kept(PAPER_FILE) if path is None else Path(path)
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            lines = list(csv.reader(stream))
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error}); expected the numbers of the paper") from error
    if not lines or tuple(lines[0]) != COLUMNS:
        found = ",".join(lines[0]) if lines else "nothing"
        raise InputError(f"{file}: begins with {found}; expected the line {','.join(COLUMNS)}")
    return [_number(f"{file}, line {number}", line) for number, line in enumerate(lines[1:], 2)]


def _number(where: str, line: list[str]) -> PaperNumber:
    if len(line) != len(COLUMNS):
        raise InputError(f"{where}: has {len(line)} columns; expected {len(COLUMNS)}: {', '.join(COLUMNS)}")
    row = dict(zip(COLUMNS, line))
    for name in ("recipe", "series", "place"):
        if not row[name]:
            raise InputError(f"{where}: {name} is empty; every number has one")
    error = row["reading_error"]
    return PaperNumber(
        recipe=row["recipe"],
        series=row["series"],
        x=row["x"],
        value=_as_float(where, "value", row["value"]),
        unit=row["unit"],
        place=row["place"],
        reading_error=_as_float(where, "reading_error", error) if error else None,
    )


def _as_float(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: {name} is {text!r}; expected a number")
    return value
