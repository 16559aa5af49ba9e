"""Set the rows of a recipe beside the numbers of the paper.

    Recipe, rows of the ledger -> newest_rows -> of each run and seed the newest row
                               -> entries     -> Entry: for the figures of krnet.report
    and numbers of the paper   -> compare     -> Comparison: ours (mean, spread, seeds), the paper's, the difference

A row whose `corrects` names the date of an earlier row of its recipe replaces that row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from krnet.report.figure import Entry, PaperNumber
from krnet.reproduce.recipe import Recipe
from krnet.reproduce.works.base import get_work

Row = Mapping[str, Any]
ALONE, WITHIN, ABOVE, BELOW = "one seed", "within the spread", "above", "below"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A number of ours beside the paper's; either may be missing."""

    series: str
    x: str
    unit: str
    ours: float | None
    """Mean over the seeds."""
    spread: float | None
    """Standard deviation over the seeds; None for fewer than two."""
    num_seeds: int
    paper: float | None
    place: str
    """Where the paper says it."""
    reading_error: float | None
    exact: bool
    """Ours is computed and draws nothing at random."""

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours - self.paper

    @property
    def verdict(self) -> str:
        """What the difference allows to say; with a single seed, or within the spread, no better or worse."""
        if self.difference is None:
            return ""
        doubt = (self.spread or 0.0) + (self.reading_error or 0.0)
        if not self.exact and self.spread is None:
            return ALONE
        if not self.exact and abs(self.difference) <= doubt:
            return WITHIN
        return "computed" if self.exact else ABOVE if self.difference > 0 else BELOW


def newest_rows(recipe: Recipe, rows: Sequence[Row]) -> dict[str, dict[int | None, Row]]:
    """Run -> seed -> its newest row. Rows of whatever recipe count; the seed None is of rows that have none."""
    replaced = {(row.get("recipe"), row["corrects"]) for row in rows if row.get("corrects")}
    kept = [row for row in rows if (row.get("recipe"), row.get("date")) not in replaced]
    kept.sort(key=lambda row: str(row.get("date")))  # stable: of one second, the later line wins
    found: dict[str, dict[int | None, Row]] = {run.name: {} for run in recipe.runs}
    for run in recipe.runs:
        work = get_work(run.work)
        for row in kept:
            seed = row.get("seed")
            if work.matches(row, run.settings, 0 if seed is None else seed):
                found[run.name][seed] = row
    return found


def entries(recipe: Recipe, rows: Sequence[Row]) -> list[Entry]:
    """The newest rows of a recipe, each with the name of its series."""
    found = newest_rows(recipe, rows)
    return [Entry(series=run.name, row=row, line=run.line) for run in recipe.runs for row in found[run.name].values()]


def compare(recipe: Recipe, rows: Sequence[Row], published: Sequence[PaperNumber]) -> list[Comparison]:
    """All numbers of the paper for this recipe beside ours, and the result of each run that the paper has not."""
    found = newest_rows(recipe, rows)
    works = {run.name: get_work(run.work) for run in recipe.runs}
    numbers = [number for number in published if number.recipe == recipe.name]
    compared = []
    for run in recipe.runs:
        own: list[PaperNumber | None] = [number for number in numbers if number.series == run.name]
        for number in own or [None]:
            x, unit = ("", "") if number is None else (number.x, number.unit)
            values = [works[run.name].value(row, x, unit) for row in found[run.name].values()]
            name = unit or works[run.name].unit
            exact = None in found[run.name]
            compared.append(_compare_one(run.name, x, name, [v for v in values if v is not None], number, exact))
    names = {run.name for run in recipe.runs}
    others = [number for number in numbers if number.series not in names]
    return compared + [_compare_one(n.series, n.x, n.unit, [], n, False) for n in others]


def _compare_one(
    series: str, x: str, unit: str, values: Sequence[float], number: PaperNumber | None, exact: bool
) -> Comparison:
    return Comparison(
        series=series,
        x=x,
        unit=unit,
        ours=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        num_seeds=len(values),
        paper=None if number is None else number.value,
        place="" if number is None else number.place,
        reading_error=None if number is None else number.reading_error,
        exact=exact,
    )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far a recipe is, for --list."""

    recipe: Recipe
    done: int
    asked: int
    """Runs, each seed counted."""
    newest: str
    """Date of the newest row; empty if there is none."""
    farthest: Comparison | None
    """The number that is farthest from the paper's, as a share of it."""


def standing(
    recipe: Recipe, rows: Sequence[Row], published: Sequence[PaperNumber], seeds: Sequence[int] | None = None
) -> Standing:
    found = newest_rows(recipe, rows)
    asked = [(run.name, seed) for run in recipe.runs for seed in seeds or run.seeds]
    done = sum(seed in found[name] or None in found[name] for name, seed in asked)
    dates = [str(row.get("date", "")) for by_seed in found.values() for row in by_seed.values()]
    differing = [c for c in compare(recipe, rows, published) if c.difference is not None and c.paper]
    farthest = max(differing, key=lambda c: abs(c.difference or 0.0) / abs(c.paper or 1.0), default=None)
    return Standing(recipe=recipe, done=done, asked=len(asked), newest=max(dates, default=""), farthest=farthest)
